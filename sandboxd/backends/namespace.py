"""Sandboxes made of Linux namespaces by a launcher process: no daemon beside ours, no root needed.

`open` starts the launcher or finds the one that an earlier daemon left. It is best called before gRPC is
used: the start is a plain fork and exec, after which this process never forks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from sandboxd import stopwatch
from sandboxd.backends import launching
from sandboxd.backends.connection import GuestConnection
from sandboxd.backends.link import Link
from sandboxd.backends.linking import Linking
from sandboxd.backends.namespace_options import NamespaceOptions
from sandboxd.backends.snapshots import Snapshots
from sandboxd.errors import BackendUnavailable, Phase, SandboxLost, StartFailed
from sandboxd.images.store import Image, ImageError
from sandboxd.telemetry.recorder import step
from sandboxd.types import Capabilities, Network, Template

__all__ = ["NamespaceBackend", "NamespaceOptions"]

# A start with less room than this on the disk would only fail later, inside the sandbox.
ROOM_BYTES = 64 << 20
NO_USERS = (
    "users = true needs a daemon that root runs, a range of users and a control group that counts processes"
    " (`sandboxd doctor` says what is missing); run it so, or leave `users` out"
)


class NamespaceBackend:
    """See `base.Backend`. Everything it makes lives under one state directory of its own."""

    name = "namespace"

    def __init__(self, state_dir: Path, options: NamespaceOptions | None = None) -> None:
        self._state = state_dir
        self._options = options or NamespaceOptions()
        self._linking = Linking(state_dir, self._options)
        self._images: dict[str, Image] = {}
        self.keeper_ended = self._linking.keeper_ended

    @property
    def instance(self) -> str:
        """What this backend's control groups are called."""
        return self._linking.instance

    @property
    def launcher_pid(self) -> int | None:
        """The host's number of the launcher that was last greeted."""
        return self._linking.launcher_pid

    async def open(self) -> None:
        """Starts the launcher, or takes over one that runs. Raises BackendUnavailable."""
        await self._linking.open()

    async def close(self) -> None:
        """See `base.Backend.close`; the launcher ends, too, and with it all that it made."""
        await self._linking.close()

    async def let_go(self) -> None:
        """See `base.Backend.let_go`: the launcher keeps all for its grace."""
        await self._linking.let_go()

    async def check(self) -> None:
        """See `base.Backend.check`; a launcher that died is replaced."""
        await self._linking.asked_again("hello")

    def capabilities(self) -> Capabilities:
        notes = []
        missing = {"memory", "pids", "cpu"} - self._linking.enforced
        if missing:
            notes.append(
                f"no control group for {', '.join(sorted(missing))}: memory is bounded for each process"
                " alone (RLIMIT_AS), processes by RLIMIT_NPROC, processor time not at all"
            )
        limits = {"disk", "open_files", "pids", *self._linking.enforced}
        return Capabilities("linux namespaces", frozenset(limits), tuple(notes))

    async def prepare(self, template: Template) -> None:
        """Refuses what this backend cannot make, and replaces a launcher that has died: the time that takes
        is no sandbox's. Raises StartFailed, BackendUnavailable.
        """
        self._checked(template)
        if self._linking.link is not None:
            await self._linking.connected()
            self._check_users(template)

    def _check_users(self, template: Template) -> None:
        """Raises StartFailed."""
        if template.users and not self._linking.has_users:
            raise StartFailed(NO_USERS, phase=Phase.CREATE, retryable=False)

    def _checked(self, template: Template) -> Image | None:
        """The template's image. Raises StartFailed."""
        if template.runtime is not None:
            raise StartFailed(
                f"runtime {template.runtime!r} is for the docker backend", phase=Phase.CREATE, retryable=False
            )
        return self._image(template.image) if template.image is not None else None

    def _image(self, name: str) -> Image:
        """Raises StartFailed."""
        try:
            return self._options.store().find(name)
        except ImageError as error:
            raise StartFailed(
                f"{error}; or leave `image` out, or use the docker backend", phase=Phase.PULL, retryable=False
            ) from error

    async def create(self, sandbox_id: str, template: Template) -> GuestConnection:
        """See `base.Backend.create`."""
        image = self._checked(template)
        if image is not None:
            template = replace(template, env={**image.environment(), **template.env})
        self._check_room()
        link = await self._linking.connected()
        self._check_users(template)
        if sandbox_id in link.lost:
            raise StartFailed(f"the name {sandbox_id!r} is taken", phase=Phase.CREATE)
        lost = link.lost[sandbox_id] = asyncio.get_running_loop().create_future()
        if image is not None:
            self._images[sandbox_id] = image
        try:
            with step("create"):
                await self._order(link, sandbox_id, template, image)
            stopwatch.enter(Phase.READY)
            connection = GuestConnection(sandbox_id, self._socket(sandbox_id), template, lost=lost)
            with step("ready"):
                await connection.ping()
        except SandboxLost as error:
            link.lost.pop(sandbox_id, None)
            # Where the launcher died, its keeper removes what is left, and this start's time is not for that.
            if not error.with_backend:
                await self.destroy(sandbox_id)
            raise StartFailed(error.message, phase=Phase.START) from error
        except BackendUnavailable as error:
            # It may still be made, if the launcher was only slow.
            link.lost.pop(sandbox_id, None)
            with contextlib.suppress(BackendUnavailable):
                link.order("destroy", id=sandbox_id)
            raise StartFailed(error.message, phase=Phase.CREATE) from error
        except BaseException:
            # First: where the launcher says nothing to the next, the name would stay taken.
            link.lost.pop(sandbox_id, None)
            await asyncio.shield(self.destroy(sandbox_id))
            raise
        return connection

    async def adopt(self, sandbox_id: str, template: Template) -> GuestConnection:
        """See `base.Backend.adopt`."""
        link = await self._linking.connected()
        if (image_id := self._linking.image_ids.get(sandbox_id)) is not None:
            image = self._images[sandbox_id] = self._image(image_id)
            template = replace(template, env={**image.environment(), **template.env})
        lost = link.lost[sandbox_id] = asyncio.get_running_loop().create_future()
        connection = GuestConnection(sandbox_id, self._socket(sandbox_id), template, lost=lost)
        await connection.ping()
        return connection

    def _socket(self, sandbox_id: str) -> str:
        # No Path: each of its parts is entered into Python's table of strings, which grows by a megabyte for
        # 20,000 names.
        return f"{self._state}/sandboxes/{sandbox_id}/guest.sock"

    def _directory(self, sandbox_id: str) -> str | None:
        directory = Path(self._socket(sandbox_id)).parent.resolve()
        return str(directory) if directory.exists() else None

    def _check_room(self) -> None:
        """Raises StartFailed; retryable where others may end and give room back."""
        try:
            disk = os.statvfs(self._state)
        except OSError as error:
            raise StartFailed(
                f"{self._state}: {error.strerror}; the state directory must stay while a daemon runs: start"
                " the daemon anew",
                phase=Phase.CREATE,
                retryable=False,
            ) from error
        left = disk.f_bavail * disk.f_frsize
        if left < ROOM_BYTES:
            raise StartFailed(
                f"DISK_FULL: {left >> 20} MiB are left for {self._state}, a start needs {ROOM_BYTES >> 20};"
                " free some space or name another state_dir",
                phase=Phase.CREATE,
                metadata={"host": "DISK_FULL"},
            )

    @staticmethod
    async def _order(link: Link, sandbox_id: str, template: Template, image: Image | None) -> None:
        answer = await link.ask(
            "create",
            id=sandbox_id,
            cwd=os.fsdecode(template.cwd),
            limits=launching.known_limits(template.limits),
            host_network=template.network is Network.HOST,
            image=image.id if image is not None else "",
            layers=[layer.directory for layer in reversed(image.layers)] if image is not None else [],
            branches=list(reversed(template.branches)),
            host_system=image is None or image.host_system,
            users=template.users,
        )
        if "error" in answer:
            raise StartFailed(f"the launcher cannot make it: {answer['error']}", phase=Phase.CREATE)

    async def destroy(self, sandbox_id: str) -> None:
        """See `base.Backend.destroy`. Raises BackendUnavailable when something stays behind."""
        link = await self._linking.survivor()
        if link is None:
            return  # What the launcher made died with it, and its keeper has removed the rest.
        answer = await link.ask("destroy", id=sandbox_id)
        self._images.pop(sandbox_id, None)
        lost = link.lost.pop(sandbox_id, None)
        if lost is not None and not lost.done():
            lost.set_result("it was destroyed")
        if "error" in answer:
            raise BackendUnavailable(
                f"sandbox {sandbox_id} could not be removed: {answer['error']}", phase=Phase.DESTROY
            )

    async def reset(self, sandbox_id: str, new_id: str, template: Template) -> GuestConnection:
        """See `base.Backend.reset`: nothing is cleaned, for nothing stays (docs/architecture.md)."""
        await self.destroy(sandbox_id)
        return await self.create(new_id, template)

    async def branch(self, sandbox_id: str, template: Template, branch: str) -> Template:
        """See `base.Backend.branch`."""
        image = self._images.get(sandbox_id)
        await self._snapshots(await self._linking.connected()).branch(sandbox_id, branch)
        same = image.id if image is not None else None  # its name may have got another since
        return replace(template, image=same, branches=(*template.branches, branch), setup=())

    async def prune(self, branch: str) -> None:
        """See `base.Backend.prune`."""
        if (link := await self._linking.survivor()) is not None:
            await self._snapshots(link).prune(branch)

    async def list_branches(self) -> list[str]:
        """See `base.Backend.list_branches`."""
        answer = await self._linking.asked_again("branches")
        # A launcher that is older than this daemon does not know; its copies go when it ends.
        return list(answer.get("branches", []))

    async def snapshot(self, sandbox_id: str, template: Template, image: str) -> int:
        """See `base.Backend.snapshot`."""
        snapshots = self._snapshots(await self._linking.connected())
        try:
            base = self._images.get(sandbox_id)
            return await snapshots.store(self._options.store(), image, sandbox_id, template, base)
        except ImageError as error:
            raise StartFailed(str(error), phase=Phase.CREATE, retryable=False) from error

    def _snapshots(self, link: Link) -> Snapshots:
        return Snapshots(link, self._options.uid_base)

    async def describe(self, sandbox_id: str) -> dict[str, str]:
        """See `base.Backend.describe`; one whose first process has ended has no `pid`, but its files."""
        pid = (await self._pids()).get(sandbox_id)
        place = {"pid": pid and str(pid), "directory": self._directory(sandbox_id)}
        return {key: value for key, value in place.items() if value}

    async def list_ids(self) -> list[str]:
        """See `base.Backend.list_ids`."""
        return list(await self._pids())

    async def pid_of(self, sandbox_id: str) -> int:
        """The host's number of the sandbox's first process. Raises KeyError."""
        return (await self._pids())[sandbox_id]

    async def _pids(self) -> dict[str, int]:
        return dict((await self._linking.asked_again("hello"))["pids"])
