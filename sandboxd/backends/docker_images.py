"""What all Docker sandboxes of one image share, done once: pull and working directory.

A sandbox's user may not make directories at the root, and doing it in each container costs a tenth of a
second each; so an image is derived that has the working directory and an open /tmp, and removed when the
backend closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import re
import tarfile
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote

import docker.auth
import docker.errors

from sandboxd.backends.engine import Api, Engine, EngineRefused, of_full_disk
from sandboxd.errors import Phase, StartFailed
from sandboxd.types import Template

LABEL = "sandboxd.instance"
# Nobody's number on Debian, Alpine and most others: not root, and owner of nothing in the image.
UNPRIVILEGED = "65534:65534"
RATE_LIMIT = re.compile(r"toomanyrequests|too many requests|rate limit", re.IGNORECASE)
UNKNOWN = re.compile(
    r"not found|manifest unknown|no such image|access denied|unauthorized|authentication required"
    r"|invalid reference|no matching manifest",
    re.IGNORECASE,
)
RATE_LIMIT_RETRY_SECONDS = 60.0
# A directory's bit in the Engine's description of a file (Go's fs.ModeDir).
GO_DIRECTORY = 1 << 31


@dataclass(frozen=True, slots=True)
class Image:
    """An image ready for sandboxes: what to run, and as whom."""

    reference: str
    user: str


class Images:
    """Prepares each (image, working directory, user) once for any number of callers."""

    def __init__(self, engine: Engine, instance: str) -> None:
        self._engine = engine
        self._instance = instance
        self._ready: dict[tuple[str, bytes], Image] = {}
        self._pending: dict[tuple[str, bytes], asyncio.Future[None]] = {}

    async def get(self, template: Template) -> Image:
        """The image of this template. Raises StartFailed with phase PULL.

        Callers that wait for another's work share its failure; when it was cancelled, one takes over.
        """
        name = template.image
        if not name:
            raise StartFailed(
                f"template {template.name!r} names no image, and the Docker backend has no default;"
                " set image in the pool's settings",
                phase=Phase.PULL,
                retryable=False,
            )
        key = (name, template.cwd)
        while key not in self._ready:
            pending = self._pending.get(key)
            if pending is None:
                await self._lead(key, template.pull_timeout)
            else:
                await asyncio.wait([pending])
                if not pending.cancelled():
                    pending.result()
        return self._ready[key]

    async def _lead(self, key: tuple[str, bytes], timeout: float) -> None:
        pending = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            self._ready[key] = await self._prepare(key[0], key[1].decode(), timeout)
            pending.set_result(None)
        except StartFailed as error:
            pending.set_exception(error)
            pending.exception()  # Nobody may be waiting; the leader raises it in any case.
            raise
        finally:
            pending.cancel()
            del self._pending[key]

    def adopt(self, template: Template, image: Image) -> None:
        """This template's image needs no more preparation."""
        self._ready[template.image or "", template.cwd] = image

    def forget(self, name: str | None) -> None:
        """The image turned out to be gone: the next caller prepares it again."""
        for key in [key for key in self._ready if key[0] == name]:
            del self._ready[key]

    async def remove_derived(self) -> None:
        """Removes the images that `get` derived for this instance."""

        def remove(api: Api) -> None:
            for image in api.images(filters={"label": f"{LABEL}={self._instance}"}):
                # By name: an image that a snapshot was made of stays below it, nameless.
                for name in image["RepoTags"] or [image["Id"]]:
                    with contextlib.suppress(docker.errors.APIError):
                        api.remove_image(name, force=True)

        await self._engine.call(remove)

    async def _prepare(self, name: str, cwd: str, timeout: float) -> Image:
        try:
            found = await self._engine.call(lambda api: api.inspect_image(name))
        except docker.errors.NotFound:
            await self._pull(name, timeout)
            found = await self._engine.call(lambda api: api.inspect_image(name))
        user = _unprivileged((found.get("Config") or {}).get("User") or "")
        digest = hashlib.sha256(f"{found['Id']} {cwd} {user} open /tmp".encode()).hexdigest()[:16]
        derivation = _Derivation(
            found["Id"], f"sandboxd-{self._instance}:{digest}", cwd, user, self._instance
        )
        try:
            await self._engine.call(derivation.run)
        except docker.errors.APIError as error:
            raise StartFailed(
                f"image {name!r} could not be prepared: {error.explanation}",
                phase=Phase.PULL,
                metadata={"image": name, **of_full_disk(str(error.explanation))},
            ) from error
        return Image(derivation.tag, user)

    async def _pull(self, name: str, timeout: float) -> None:
        # Without a tag the Engine would pull every one of them.
        reference = name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"
        target = f"/images/create?fromImage={quote(reference, safe='')}"
        try:
            async with asyncio.timeout(timeout):
                headers = await self._engine.call(lambda api: _login(api, name))
                async with self._engine.lines("POST", target, headers, patient=True) as progress:
                    async for step in progress:
                        if "error" in step:
                            raise _pull_failed(name, str(step["error"]))
        except TimeoutError as error:
            raise StartFailed(
                f"image {name!r} was not pulled within {timeout:g} s", phase=Phase.PULL
            ) from error
        except EngineRefused as error:
            raise _pull_failed(name, str(error)) from error


def _login(api: Api, name: str) -> dict[str, str]:
    """What `docker login` left for this image's registry, as a header."""
    host, _ = docker.auth.resolve_repository_name(name)
    header: bytes | None = docker.auth.get_config_header(api, host)
    return {"X-Registry-Auth": header.decode()} if header else {}


def _pull_failed(name: str, message: str) -> StartFailed:
    if RATE_LIMIT.search(message):
        return StartFailed(
            f"image {name!r} was not pulled: the registry limits the rate ({message}); log in or wait",
            phase=Phase.PULL,
            retry_after=RATE_LIMIT_RETRY_SECONDS,
            metadata={"image": name, "pull": "RATE_LIMITED"},
        )
    if full := of_full_disk(message):
        return StartFailed(
            f"DISK_FULL: image {name!r} was not pulled, for the Engine's store has no room ({message}); free"
            " some (docker system prune), or give it another disk",
            phase=Phase.PULL,
            metadata={"image": name, "pull": "FAILED", **full},
        )
    if UNKNOWN.search(message):
        return StartFailed(
            f"image {name!r} is neither on this host nor in its registry ({message}); build or import it, or"
            " correct the pool's image",
            phase=Phase.PULL,
            retryable=False,
            metadata={"image": name, "pull": "IMAGE_NOT_FOUND"},
        )
    return StartFailed(
        f"image {name!r} is not on this host and was not pulled: {message}",
        phase=Phase.PULL,
        metadata={"image": name, "pull": "FAILED"},
    )


def _unprivileged(user: str) -> str:
    """The image's own user when it names one, else one that is not root."""
    return UNPRIVILEGED if user.partition(":")[0] in ("", "0", "root") else user


@dataclass(frozen=True, slots=True)
class _Derivation:
    """Makes one derived image; runs in a thread from beginning to end."""

    base: str
    tag: str
    cwd: str
    user: str
    instance: str

    def run(self, api: Api) -> None:
        """Does nothing when it was done before. Raises APIError."""
        try:
            api.inspect_image(self.tag)
            return
        except docker.errors.NotFound:
            pass
        container = api.create_container(
            self.base,
            entrypoint=["/none"],  # It is never started.
            user=self.user,
            working_dir="/",  # Else the Engine itself makes the image's own, for root.
            labels={LABEL: self.instance},
            host_config=api.create_host_config(
                network_mode="none", cap_drop=["ALL"], security_opt=["no-new-privileges"]
            ),
        )["Id"]
        try:
            missing = self._missing(api, container)
            closed = self._closed_tmp(api, container)
            if missing or closed:
                api.put_archive(container, "/", self._tar(missing, open_tmp=closed))
            repository, _, tag = self.tag.partition(":")
            api.commit(container, repository=repository, tag=tag, changes=f"LABEL {LABEL}={self.instance}")
        finally:
            api.remove_container(container, force=True, v=True)

    def _missing(self, api: Api, container: str) -> list[str]:
        path = PurePosixPath(self.cwd)
        missing = []
        for candidate in (path, *path.parents):
            try:
                pieces, _ = api.get_archive(container, str(candidate))
                pieces.close()
                break
            except docker.errors.NotFound:
                missing.append(str(candidate).lstrip("/"))
        return missing[::-1]

    def _closed_tmp(self, api: Api, container: str) -> bool:
        """Whether the image's /tmp is closed to its user: runc gives what is mounted there the same mode."""
        try:
            pieces, found = api.get_archive(container, "/tmp")  # noqa: S108 - inside the container
        except docker.errors.NotFound:
            return True
        pieces.close()
        return bool(found["mode"] & GO_DIRECTORY) and found["mode"] & 0o777 != 0o777

    def _tar(self, directories: list[str], *, open_tmp: bool) -> bytes:
        owner, _, group = self.user.partition(":")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            if open_tmp:
                entry = tarfile.TarInfo("tmp")
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
                archive.addfile(entry)
            for directory in directories:
                entry = tarfile.TarInfo(directory)
                entry.type = tarfile.DIRTYPE
                if owner.isdigit():
                    entry.uid, entry.gid, entry.mode = int(owner), int(group or owner), 0o755
                else:
                    entry.mode = 0o777  # The name's number stands in the image's own passwd.
                archive.addfile(entry)
        return buffer.getvalue()
