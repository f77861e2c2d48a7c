"""Sandboxes made of Linux namespaces by a launcher process: no daemon beside ours, no root needed.

`open` starts the launcher or finds the one that an earlier daemon left. It is best called before gRPC is
used: the start is a plain fork and exec, after which this process never forks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sandboxd.backends import launching
from sandboxd.backends.channel import dial
from sandboxd.backends.connection import GuestConnection
from sandboxd.backends.instance import instance
from sandboxd.backends.link import ASK_SECONDS, Link
from sandboxd.backends.native import guest_program
from sandboxd.backends.snapshots import Snapshots
from sandboxd.backends.users import UID_BASE
from sandboxd.errors import BackendUnavailable, Phase, SandboxLost, StartFailed
from sandboxd.images.store import Image, ImageError, ImageStore
from sandboxd.types import Capabilities, Network, Template

logger = logging.getLogger(__name__)

# A launcher without a daemon keeps its sandboxes for this long.
GRACE_SECONDS = 60.0
# So many launchers are greeted before one that dies under the first words is an error.
GREETINGS = 3
# A start with less room than this on the disk would only fail later, inside the sandbox.
ROOM_BYTES = 64 << 20
CONTROL_LINE_BYTES = 4 << 20
VERSION = 3


@dataclass(frozen=True, slots=True)
class NamespaceOptions:
    """What can be set; the defaults fit.

    `read_only_paths` are host directories that sandboxes of the host's own system see besides its own.
    `images_dir` is the image store, if there is one. `python` runs the launcher, which is given up when it
    does not answer for `answer_seconds`.
    """

    read_only_paths: tuple[Path, ...] = ()
    images_dir: Path | None = None
    python: str = sys.executable
    uid_base: int = UID_BASE
    grace_seconds: float = GRACE_SECONDS
    answer_seconds: float = ASK_SECONDS
    cgroup_root: Path = Path("/sys/fs/cgroup")


class NamespaceBackend:
    """See `base.Backend`. Everything it makes lives under one state directory of its own."""

    name = "namespace"

    def __init__(self, state_dir: Path, options: NamespaceOptions | None = None) -> None:
        self._state = state_dir
        self._options = options or NamespaceOptions()
        self._link: Link | None = None
        self._linking = asyncio.Lock()
        self._images: dict[str, Image] = {}
        self._image_ids: dict[str, str] = {}
        self._enforced: frozenset[str] = frozenset()
        self._keeper_end: asyncio.Future[None] | None = None
        self.launcher_pid: int | None = None

    @property
    def instance(self) -> str:
        """What this backend's control groups are called."""
        return f"sandboxd-{instance(self._state)}"

    async def open(self) -> None:
        """Starts the launcher, or takes over one that runs. Raises BackendUnavailable."""
        try:
            self._state.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise BackendUnavailable(f"{self._state} cannot be made: {error.strerror}") from error
        await self._connected()

    async def close(self) -> None:
        """See `base.Backend.close`; the launcher ends, too, and with it all that it made."""
        async with self._linking:
            link, self._link = self._link, None
            if link is not None and link.broken:
                await link.close()
                # It has died, or another daemon was heard since.
                link = await self._find()
            if link is None:
                await self.keeper_ended()
                launching.remove_state(self._state)
                return
            try:
                await link.ask("close")
            except BackendUnavailable:
                pass  # It died; its keeper removes what was left.
            finally:
                await link.close()
            await self.keeper_ended()
            launching.remove_state(self._state)

    async def keeper_ended(self) -> None:
        """Returns when a launcher that let go or died has left nothing. Raises BackendUnavailable."""
        if self._keeper_end is None:
            return
        try:
            async with asyncio.timeout(launching.START_SECONDS):
                await asyncio.shield(self._keeper_end)
        except TimeoutError as error:
            raise BackendUnavailable(
                f"the keeper of {self._state} did not end; its log is {self._state / launching.LOG_FILE}"
            ) from error

    async def check(self) -> None:
        """See `base.Backend.check`; a launcher that died is replaced."""
        await self._asked_again("hello")

    def capabilities(self) -> Capabilities:
        notes = []
        missing = {"memory", "pids", "cpu"} - self._enforced
        if missing:
            notes.append(
                f"no control group for {', '.join(sorted(missing))}: memory is bounded for each process"
                " alone (RLIMIT_AS), processes by RLIMIT_NPROC, processor time not at all"
            )
        limits = {"disk", "open_files", "pids", *self._enforced}
        return Capabilities("linux namespaces", frozenset(limits), tuple(notes))

    async def prepare(self, template: Template) -> None:
        """Refuses what this backend cannot make. Raises StartFailed."""
        self._checked(template)

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
            return self._store().find(name)
        except ImageError as error:
            raise StartFailed(
                f"{error}; or leave `image` out, or use the docker backend", phase=Phase.PULL, retryable=False
            ) from error

    def _open_store(self) -> str:
        """Where the image store is, made if it was missing; empty when there is none."""
        try:
            store = self._store()
            store.open()
        except ImageError as error:
            logger.warning("no images: %s", error)
            return ""
        return str(store.root.resolve())

    def _store(self) -> ImageStore:
        """Raises ImageError."""
        if self._options.images_dir is None:
            raise ImageError("this backend has no image store")
        return ImageStore(self._options.images_dir)

    async def create(self, sandbox_id: str, template: Template) -> GuestConnection:
        """See `base.Backend.create`."""
        image = self._checked(template)
        if image is not None:
            template = replace(template, env={**image.environment(), **template.env})
        self._check_room()
        link = await self._connected()
        if sandbox_id in link.lost:
            raise StartFailed(f"the name {sandbox_id!r} is taken", phase=Phase.CREATE, retryable=False)
        lost = link.lost[sandbox_id] = asyncio.get_running_loop().create_future()
        if image is not None:
            self._images[sandbox_id] = image
        try:
            await self._order(link, sandbox_id, template, image)
            connection = GuestConnection(sandbox_id, self._socket(sandbox_id), template, lost=lost)
            await connection.ping()
        except SandboxLost as error:
            link.lost.pop(sandbox_id, None)
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
        link = await self._connected()
        if (image_id := self._image_ids.get(sandbox_id)) is not None:
            image = self._images[sandbox_id] = self._image(image_id)
            template = replace(template, env={**image.environment(), **template.env})
        lost = link.lost[sandbox_id] = asyncio.get_running_loop().create_future()
        connection = GuestConnection(sandbox_id, self._socket(sandbox_id), template, lost=lost)
        await connection.ping()
        return connection

    def _socket(self, sandbox_id: str) -> Path:
        return self._state / "sandboxes" / sandbox_id / "guest.sock"

    def _check_room(self) -> None:
        """Raises StartFailed; retryable, for others may end and give room back."""
        disk = os.statvfs(self._state)
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
        )
        if "error" in answer:
            raise StartFailed(f"the launcher cannot make it: {answer['error']}", phase=Phase.CREATE)

    async def destroy(self, sandbox_id: str) -> None:
        """See `base.Backend.destroy`. Raises BackendUnavailable when something stays behind."""
        link = self._link
        if link is None:
            return
        if link.broken:
            # What the launcher made died with it, and its keeper removes the rest.
            await self.keeper_ended()
            return
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
        await self._snapshots(await self._connected()).branch(sandbox_id, branch)
        same = image.id if image is not None else None  # its name may have got another since
        return replace(template, image=same, branches=(*template.branches, branch), setup=())

    async def prune(self, branch: str) -> None:
        """See `base.Backend.prune`."""
        if self._link is not None and not self._link.broken:
            await self._snapshots(self._link).prune(branch)

    async def list_branches(self) -> list[str]:
        """See `base.Backend.list_branches`."""
        return await self._snapshots(await self._connected()).list_branches()

    async def snapshot(self, sandbox_id: str, template: Template, image: str) -> int:
        """See `base.Backend.snapshot`."""
        snapshots = self._snapshots(await self._connected())
        try:
            base = self._images.get(sandbox_id)
            return await snapshots.store(self._store(), image, sandbox_id, template, base)
        except ImageError as error:
            raise StartFailed(str(error), phase=Phase.CREATE, retryable=False) from error

    def _snapshots(self, link: Link) -> Snapshots:
        return Snapshots(link, self._options.uid_base)

    async def describe(self, sandbox_id: str) -> dict[str, str]:
        """See `base.Backend.describe`; one whose first process has ended has no `pid`, but its files."""
        pid = (await self._pids()).get(sandbox_id)
        directory = self._socket(sandbox_id).parent.resolve()
        place = {"pid": pid and str(pid), "directory": str(directory) if directory.exists() else None}
        return {key: value for key, value in place.items() if value}

    async def list_ids(self) -> list[str]:
        """See `base.Backend.list_ids`."""
        return list(await self._pids())

    async def pid_of(self, sandbox_id: str) -> int:
        """The host's number of the sandbox's first process. Raises KeyError."""
        return (await self._pids())[sandbox_id]

    async def _pids(self) -> dict[str, int]:
        return dict((await self._asked_again("hello"))["pids"])

    async def let_go(self) -> None:
        """See `base.Backend.let_go`: the launcher keeps all for its grace."""
        async with self._linking:
            link, self._link = self._link, None
            if link is None:
                launching.remove_state(self._state)
            else:
                await link.close()

    async def _connected(self) -> Link:
        async with self._linking:
            if self._link is not None and not self._link.broken:
                return self._link
            if self._link is not None:
                await self._link.close()
            link, hello = await self._greeted()
            try:
                launching.check_version(hello, VERSION, self._state)
                self._keeper_end = launching.end_of(hello["keeper"])
            except BackendUnavailable:
                await link.close()
                raise
            self._link = link
            self._image_ids = hello["images"]
            self._enforced = frozenset(hello["enforced"])
            self.launcher_pid = hello["pid"]
            return link

    async def _greeted(self) -> tuple[Link, dict[str, Any]]:
        for attempt in range(GREETINGS):
            link = await self._find()
            if link is None:
                await self._start()
                link = await self._find()
            if link is None:
                break
            try:
                return link, await link.ask("hello")
            except BackendUnavailable:
                # It took the connection in its last moment.
                await link.close()
                if attempt == GREETINGS - 1:
                    raise
        raise BackendUnavailable(f"the launcher in {self._state} does not answer")

    async def _asked_again(self, what: str) -> dict[str, Any]:
        """The answer of the launcher, or of the next where it dies before it answers."""
        for _ in range(GREETINGS - 1):
            try:
                return await (await self._connected()).ask(what)
            except BackendUnavailable:
                if self._link is None or not self._link.broken:
                    raise
        return await (await self._connected()).ask(what)

    async def _find(self) -> Link | None:
        try:
            sock = await dial(self._state / "launcher.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise BackendUnavailable(f"{self._state / 'launcher.sock'}: {error.strerror}") from error
        streams = await asyncio.open_unix_connection(sock=sock, limit=CONTROL_LINE_BYTES)
        return Link(*streams, answer_seconds=self._options.answer_seconds)

    async def _start(self) -> None:
        options = self._options
        state, images = self._state.resolve(), await asyncio.to_thread(self._open_store)
        spec = {
            "state": str(state),
            "name": self.instance,
            "cgroup_root": str(options.cgroup_root),
            "read_only_paths": [str(path) for path in options.read_only_paths],
            "images": images,
            "guest": str(guest_program()),
            "uid_base": options.uid_base,
            "grace": options.grace_seconds,
        }
        await launching.launch(options.python, spec)
