"""Sandboxes as Docker containers on this host: the namespace backend's guest inside, hardened by default.

A container runs the guest as its first process, whatever its image holds: the daemon speaks to it through a
socket in a directory of its own, and an exec costs milliseconds. Where the guest was not built a shell waits
instead; then, and under runtimes that keep the socket inside (gVisor), `docker_exec` runs the commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker.errors
import docker.utils
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from sandboxd.backends.base import Connection
from sandboxd.backends.connection import GuestConnection
from sandboxd.backends.docker_exec import ExecConnection
from sandboxd.backends.docker_images import LABEL, Images
from sandboxd.backends.docker_start import SOCKET, Start
from sandboxd.backends.engine import Api, Engine, EngineRefused
from sandboxd.backends.instance import instance
from sandboxd.backends.native import PROGRAM
from sandboxd.errors import BackendUnavailable, InvalidRequest, Phase, SandboxLost, StartFailed
from sandboxd.lifetime import cleaned_up
from sandboxd.types import Capabilities, Template

SANDBOX_LABEL = "sandboxd.sandbox"
SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
BY_ENGINE = (
    "commands run through the Engine's exec API: 60 to 200 ms each, without signals, terminals, named"
    " commands and CPU times"
)
# The guest's socket breaks a little before the Engine knows that its container ended.
CAUSE_SECONDS = 5.0
# What the Engine says while the kernel still holds on to a dying container's mounts.
BUSY = re.compile(
    r"device or resource busy|unable to remove filesystem|driver .* failed to remove", re.IGNORECASE
)
GOING = re.compile(r"removal of container .* is already in progress", re.IGNORECASE)


class DockerBackend:
    """Implements `base.Backend`; `state_dir` holds the sandboxes' sockets and names the instance, `guest` is
    the program of their first processes, which may be missing.

    Two daemons with different state directories never touch each other's containers, and a daemon that
    starts again on the same one finds those it left behind.
    """

    name = "docker"

    def __init__(self, state_dir: Path, *, engine: Engine | None = None, guest: Path = PROGRAM) -> None:
        self._state_dir = state_dir
        self._guest = guest if guest.is_file() else None
        self._engine = engine or Engine()
        self._instance = instance(state_dir)
        self._images = Images(self._engine, self._instance)
        self._capabilities = Capabilities("docker")

    async def open(self) -> None:
        """Connects to the Engine. Raises BackendUnavailable with the way out."""
        info = await self._engine.open()
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._state_dir.chmod(0o700)  # What is inside is open to the sandboxes' users; this is not.
        self._capabilities = _capabilities(info, has_guest=self._guest is not None)

    async def close(self) -> None:
        """Destroys every sandbox of this instance, and the images derived for them."""
        if not self._engine.is_open:
            return
        try:
            with contextlib.suppress(BackendUnavailable):
                there = await self.list_ids()
                await asyncio.gather(*(self._try_to_destroy(sandbox_id) for sandbox_id in there))
                await self._engine.call(self._remove_leftovers)
                await self._images.remove_derived()
        finally:
            self._engine.close()
            shutil.rmtree(self._state_dir, ignore_errors=True)

    async def let_go(self) -> None:
        """See `base.Backend.let_go`."""
        if self._engine.is_open:
            self._engine.close()
        with contextlib.suppress(OSError):
            # Only where nothing is in it.
            self._state_dir.rmdir()

    async def check(self) -> None:
        """See `base.Backend.check`."""
        await self._engine.ping()

    def capabilities(self) -> Capabilities:
        """What the Engine really enforces."""
        return self._capabilities

    async def prepare(self, template: Template) -> None:
        """Pulls the image when it is not there, and readies it; once for any number of calls."""
        _check_users(template)
        await self._images.get(template)

    async def create(self, sandbox_id: str, template: Template) -> Connection:
        """Starts a container and returns when its first process answers."""
        if not SANDBOX_ID.fullmatch(sandbox_id):
            raise InvalidRequest(f"{sandbox_id!r} cannot be part of a container's name")
        _check_users(template)
        image = await self._images.get(template)
        start = Start(self._engine, self._name(sandbox_id), self._directory(sandbox_id), self._guest)
        try:
            async with asyncio.timeout(template.start_timeout):
                await start.run(template, image, self._labels(sandbox_id))
        except TimeoutError as error:
            await self.destroy(sandbox_id)
            raise start.failed(f"not ready within {template.start_timeout:g} s") from error
        except (docker.errors.APIError, EngineRefused) as error:
            await self.destroy(sandbox_id)
            if isinstance(error, docker.errors.ImageNotFound):
                self._images.forget(template.image)
            raise start.refused(error) from error
        except BaseException:
            await self.destroy(sandbox_id)
            raise
        return self._connection(sandbox_id, template)

    def _connection(self, sandbox_id: str, template: Template) -> Connection:
        path = self._directory(sandbox_id) / SOCKET
        # None without a guest; and a runtime with a kernel of its own (gVisor) keeps it inside.
        if path.exists():
            return _ContainerGuest(self._engine, self._name(sandbox_id), sandbox_id, path, template)
        return ExecConnection(self._engine, self._name(sandbox_id), sandbox_id, template)

    async def adopt(self, sandbox_id: str, template: Template) -> Connection:
        """See `base.Backend.adopt`."""
        connection = self._connection(sandbox_id, template)
        await connection.ping()
        return connection

    async def destroy(self, sandbox_id: str) -> None:
        """Kills and removes the container with its volumes, and its directory."""
        name = self._name(sandbox_id)
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_busy),
            stop=stop_after_attempt(6),
            wait=wait_random_exponential(multiplier=0.2, max=2.0),
            reraise=True,
        )
        try:
            await retrying(self._engine.call, lambda api: api.remove_container(name, force=True, v=True))
        except docker.errors.NotFound:
            pass  # Destroyed already, or never created.
        except docker.errors.APIError as error:
            if not GOING.search(str(error.explanation)):
                raise BackendUnavailable(
                    f"container {name} could not be removed: {error.explanation}", phase=Phase.DESTROY
                ) from error
        shutil.rmtree(self._directory(sandbox_id), ignore_errors=True)

    async def _try_to_destroy(self, sandbox_id: str) -> None:
        with contextlib.suppress(BackendUnavailable):
            await self.destroy(sandbox_id)

    async def reset(self, sandbox_id: str, new_id: str, template: Template) -> Connection:
        """Refuses: the Engine cannot drop what a container has written."""
        del sandbox_id, new_id, template
        raise InvalidRequest("a container cannot be proven to be as new; leave max_uses at 1")

    async def branch(self, sandbox_id: str, template: Template, branch: str) -> Template:
        """See `base.Backend.branch`; the Engine stops the container's processes while it copies."""
        image = await self._images.get(template)
        tag = self._branch_tag(branch)
        try:
            await self._commit(sandbox_id, tag, f"LABEL {LABEL}={self._instance}")
        except BaseException:
            # Also what the Engine finished after a call of ours had given up on it.
            await cleaned_up(f"removing branch {branch}", self.prune(branch))
            raise
        forks = replace(template, image=tag, branches=(*template.branches, branch), setup=())
        self._images.adopt(forks, replace(image, reference=tag))
        return forks

    async def prune(self, branch: str) -> None:
        """See `base.Backend.prune`."""
        tag = self._branch_tag(branch)
        self._images.forget(tag)
        try:
            await self._engine.call(lambda api: api.remove_image(tag, force=True))
        except docker.errors.NotFound:
            pass  # Removed already, or never made.
        except docker.errors.APIError as error:
            raise BackendUnavailable(
                f"image {tag} could not be removed: {error.explanation}", phase=Phase.DESTROY
            ) from error

    async def list_branches(self) -> list[str]:
        """See `base.Backend.list_branches`."""
        start = self._branch_tag("")
        images = await self._engine.call(lambda api: api.images(name=start.partition(":")[0]))
        tags = [tag for image in images for tag in image["RepoTags"] or ()]
        return [tag.removeprefix(start) for tag in tags if tag.startswith(start)]

    async def snapshot(self, sandbox_id: str, template: Template, image: str) -> int:  # noqa: ARG002 - contract
        """See `base.Backend.snapshot`; the image is the Engine's, `image` its name, perhaps with a tag."""
        # Without its value the label makes it nobody's: it stays when this instance goes.
        await self._commit(sandbox_id, image, f"LABEL {LABEL}=")
        history = await self._engine.call(lambda api: api.history(image))
        size: int = history[0]["Size"]
        return size

    async def _commit(self, sandbox_id: str, image: str, changes: str) -> None:
        """Raises StartFailed, SandboxLost; undoes what was done when it is cancelled."""
        repository, tag = docker.utils.parse_repository_tag(image)
        name = self._name(sandbox_id)
        made: list[str] = []

        def commit(api: Api) -> None:
            done = api.commit(name, repository=repository, tag=tag or "latest", changes=changes)
            made.append(done["Id"])

        try:
            await self._engine.call(commit)
        except asyncio.CancelledError:
            # Over by now, as any cancelled call of the Engine.
            if made:
                remove = self._engine.call(lambda api: api.remove_image(made[0], force=True))
                await cleaned_up(f"removing image {image}", remove)
            raise
        except docker.errors.NotFound as error:
            raise SandboxLost(f"container {name} is gone", phase=Phase.FILE) from error
        except docker.errors.APIError as error:
            raise StartFailed(
                f"the Docker Engine could not commit {name} as {image!r}: {error.explanation}",
                phase=Phase.CREATE,
                retryable=False,
            ) from error

    def _branch_tag(self, branch: str) -> str:
        return f"sandboxd-{self._instance}:branch-{branch}"

    async def describe(self, sandbox_id: str) -> dict[str, str]:
        """See `base.Backend.describe`."""
        name = self._name(sandbox_id)
        return {"container": name} if sandbox_id in await self.list_ids() else {}

    async def list_ids(self) -> list[str]:
        """The sandboxes of this instance, by the Engine's word. Raises BackendUnavailable."""
        filters = {"label": [f"{LABEL}={self._instance}", SANDBOX_LABEL]}
        try:
            found = await self._engine.call(lambda api: api.containers(all=True, filters=filters))
        except docker.errors.APIError as error:
            raise BackendUnavailable(
                f"the Docker Engine could not list its containers: {error.explanation}"
            ) from error
        return [container["Labels"][SANDBOX_LABEL] for container in found]

    def _remove_leftovers(self, api: Api) -> None:
        """Containers that a killed daemon left while it prepared an image."""
        for container in api.containers(all=True, filters={"label": f"{LABEL}={self._instance}"}):
            with contextlib.suppress(docker.errors.APIError):
                api.remove_container(container["Id"], force=True, v=True)

    def _name(self, sandbox_id: str) -> str:
        return f"sandboxd-{self._instance}-{sandbox_id}"

    def _directory(self, sandbox_id: str) -> Path:
        return self._state_dir / sandbox_id

    def _labels(self, sandbox_id: str) -> dict[str, str]:
        return {LABEL: self._instance, SANDBOX_LABEL: sandbox_id}


class _ContainerGuest(GuestConnection):
    """A guest whose end the Engine can explain."""

    def __init__(
        self, engine: Engine, container: str, sandbox_id: str, path: Path, template: Template
    ) -> None:
        super().__init__(sandbox_id, path, template)
        self._engine = engine
        self._container = container

    async def wait_lost(self) -> str:
        """See `base.Connection.wait_lost`; the cause is the Engine's where it knows one."""
        why = await super().wait_lost()
        with contextlib.suppress(BackendUnavailable, TimeoutError):
            async with asyncio.timeout(CAUSE_SECONDS):
                return await self._engine.wait_ended(self._container)
        return why


def _capabilities(info: dict[str, Any], *, has_guest: bool) -> Capabilities:
    enforced = {"open_files"}
    enforced.update(
        limit
        for limit, key in (("memory", "MemoryLimit"), ("pids", "PidsLimit"), ("cpu", "CpuCfsQuota"))
        if info.get(key)
    )
    where = "under gVisor" if has_guest else "without the guest, which was not built (run `make guest`),"
    return Capabilities(
        isolation=f"docker {info.get('ServerVersion', '?')}, {info.get('DefaultRuntime', '?')}",
        enforced_limits=frozenset(enforced),
        notes=(
            f"{where} {BY_ENGINE}",
            "disk_bytes is not enforced: the writable layer shares the Engine's disk",
        ),
    )


def _check_users(template: Template) -> None:
    """Raises StartFailed. A container's numbers are the host's: one that may become root is the owner of
    what the daemon shares with it, the directory of its socket above all."""
    if template.users:
        raise StartFailed(
            "users = true is for the namespace backend: a container's root has the number of the host's root",
            phase=Phase.CREATE,
            retryable=False,
        )


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, docker.errors.APIError) and bool(BUSY.search(str(error.explanation)))
