"""Where imported images lie: each layer once, by its content; an image is a list of layers and settings.

    layers/<32 hex digits of its digest>    a directory tree, as overlay mounts take it
    images/<64 hex digits>.json             what is in it; whoever uses an image holds a shared lock on it
    names.json                              name → image
    partial/                                layers that are being unpacked, and a lock for each
    importing                               held, shared, by every import; alone by who removes layers
    lock                                    held while names, images or layers are changed

All changes are a rename, so that a reader without any lock sees the state before or after.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sandboxd.backends.sweeper import remove_tree

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
LAYER_DIGITS = 32
"""Enough to tell layers apart, and few enough for more than a hundred of them in one mount call's page."""
LAYER_LIMIT = 100
LOCK_PAUSE_SECONDS = 0.05


class ImageError(Exception):
    """An image cannot be used, imported or removed; the message is one line for a person."""


class ImageNotFound(ImageError):
    """The store has no image of that name."""


def check_name(name: str) -> None:
    """Raises ImageError for what cannot be an image's name."""
    if not NAME.fullmatch(name):
        raise ImageError(f"image name {name!r}: letters, digits and ._/:@- only, at most 255")


@dataclass(frozen=True, slots=True)
class Layer:
    """`digest` is the SHA-256 of its uncompressed archive; `size` the bytes of its files, unpacked."""

    digest: str
    size: int

    @property
    def directory(self) -> str:
        """Its name below `layers/`."""
        return self.digest[:LAYER_DIGITS]


@dataclass(frozen=True, slots=True)
class Image:
    """Layers from the lowest to the highest, and what the image says of the commands run in it."""

    layers: tuple[Layer, ...]
    env: dict[str, str] = field(default_factory=dict)
    source: str = ""
    created: float = 0.0
    host_system: bool = False
    """Its layers lie upon the host's own system directories: a snapshot of a sandbox without an image."""

    @property
    def id(self) -> str:
        """64 hex digits, the same wherever the same layers and environment are imported."""
        content = [[layer.digest for layer in self.layers], sorted(self.env.items()), self.host_system]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def environment(self) -> dict[bytes, bytes]:
        """`env` as the kernel has it."""
        return {os.fsencode(key): os.fsencode(value) for key, value in self.env.items()}

    @property
    def size(self) -> int:
        """Bytes of all its layers' files; layers that other images have, too, are counted."""
        return sum(layer.size for layer in self.layers)


class ImageStore:
    """One store. Any number of processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def layers(self) -> Path:
        """Where the layers' directories are."""
        return self.root / "layers"

    def open(self) -> None:
        """Makes the store if it is missing. Raises ImageError."""
        try:
            for directory in (self.root, self.layers, self.root / "images", self.root / "partial"):
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(0o755)
            # Images bring set-user-id programs, and snapshots what was nobody else's: no other user of this
            # host walks here. Launchers are given what they need by descriptor.
            self.root.chmod(0o700)
        except OSError as error:
            raise ImageError(f"image store {self.root} cannot be made: {error.strerror}") from error

    # -- reading

    def names(self) -> dict[str, str]:
        """Name → id."""
        try:
            names: dict[str, str] = json.loads((self.root / "names.json").read_text())
        except FileNotFoundError:
            return {}
        return names

    def find(self, name: str) -> Image:
        """The image of this name, or of this id. Raises ImageNotFound."""
        names = self.names()
        try:
            return self._read(names.get(name, name))
        except (FileNotFoundError, ValueError, TypeError):
            raise self._unknown(name) from None

    def _unknown(self, name: str) -> ImageNotFound:
        names = sorted(self.names())
        known = f"known here: {', '.join(names)}" if names else "none is imported yet"
        return ImageNotFound(
            f"image {name!r} is not in the store {self.root} ({known});"
            " import it with `sandboxd image import SOURCE --name NAME`"
        )

    def images(self) -> Iterator[Image]:
        """All of them."""
        for image_id in self._ids():
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # removed since, or damaged
                yield self._read(image_id)

    def _ids(self) -> Iterator[str]:
        for record in (self.root / "images").glob("[!.]*.json"):
            yield record.stem

    def _read(self, image_id: str) -> Image:
        if not re.fullmatch(r"[0-9a-f]{64}", image_id):
            raise ValueError(image_id)
        values = json.loads(self._record(image_id).read_text())
        values["layers"] = tuple(Layer(**layer) for layer in values["layers"])
        return Image(**values)

    def _record(self, image_id: str) -> Path:
        return self.root / "images" / f"{image_id}.json"

    def has(self, digest: str) -> bool:
        """Whether a layer is there, whole."""
        return (self.layers / digest[:LAYER_DIGITS]).is_dir()

    def size_of(self, digest: str) -> int:
        """Bytes of the files of a layer that is there."""
        for image in self.images():
            for layer in image.layers:
                if layer.digest == digest:
                    return layer.size
        tree = self.layers / digest[:LAYER_DIGITS]
        return sum(
            status.st_size for path in tree.rglob("*") if stat.S_ISREG((status := path.lstat()).st_mode)
        )

    # -- adding

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """What is added inside of the block stays until it is named; waits while the store is cleaned."""
        with self._locked("importing", fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def partial(self) -> Iterator[Path]:
        """A directory to unpack a layer into; what is still there at the end, or after this process, goes.

        Raises ImageError.
        """
        path = self.root / "partial" / secrets.token_hex(16)
        with self._named():
            path.mkdir()
            path.chmod(0o755)
        try:
            yield path
        finally:
            with self._named():
                remove(path)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """What the file system refuses as an ImageError."""
        try:
            yield
        except OSError as error:
            where = error.filename or self.root
            raise ImageError(f"image store {self.root}: {where}: {error.strerror}") from error

    @contextlib.asynccontextmanager
    async def only_one(self, digest: str) -> AsyncIterator[None]:
        """One process at a time for one layer."""
        fd = self._open_lock(f"partial/{digest}.lock")
        try:
            while not _try_lock(fd):  # noqa: ASYNC110 - another process's lock tells nobody
                await asyncio.sleep(LOCK_PAUSE_SECONDS)
            yield
        finally:
            os.close(fd)

    def add_layer(self, digest: str, tree: Path) -> None:
        """Takes a whole tree over as this layer; one that another process added meanwhile is as good."""
        with self._changing(), self._named():
            if not self.has(digest):
                tree.rename(self.layers / digest[:LAYER_DIGITS])

    def drop_unnamed(self, digests: Sequence[str]) -> None:
        """Removes those of these layers that are no image's; for who imports, and has added them."""
        with self._changing(), self._named():
            used = {layer.directory for image in self.images() for layer in image.layers}
            for digest in digests:
                if digest[:LAYER_DIGITS] not in used:
                    remove(self.layers / digest[:LAYER_DIGITS])

    def add(self, name: str, image: Image) -> None:
        """Names an image whose layers are there; the name may have named another. Raises ImageError."""
        with self._changing(), self._named():
            missing = [layer.digest for layer in image.layers if not self.has(layer.digest)]
            if missing:
                raise ImageError(
                    f"layer {missing[0]} was removed while {name!r} was imported; import it again"
                )
            record = self._record(image.id)
            if not record.exists():
                self._write(record, asdict(image))
            self._write(self.root / "names.json", {**self.names(), name: image.id})

    def _write(self, path: Path, value: object) -> None:
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            new.write_text(json.dumps(value))
            new.chmod(0o644)
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)

    def _changing(self) -> contextlib.AbstractContextManager[None]:
        return self._locked("lock", fcntl.LOCK_EX)

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        fd = self._open_lock(name)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)

    def _open_lock(self, name: str) -> int:
        try:
            return os.open(self.root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ImageError(f"image store {self.root} cannot be changed: {error.strerror}") from error

    # -- removing

    def forget(self, name: str) -> None:
        """Takes a name away, and its image if no other name has it.

        Raises ImageError while sandboxes use it, ImageNotFound.
        """
        with self._changing():
            names = self.names()
            if name not in names:
                raise self._unknown(name)
            image_id = names.pop(name)
            if image_id in names.values():
                self._write(self.root / "names.json", names)
                return
            with self._unused(image_id) as unused:
                if not unused:
                    raise ImageError(f"image {name!r} is in use by sandboxes; release them first")
                self._write(self.root / "names.json", names)
                self._record(image_id).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _unused(self, image_id: str) -> Iterator[bool]:
        """Whether no launcher holds it; none can begin to within the block."""
        try:
            fd = os.open(self._record(image_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield True
            return
        try:
            yield _try_lock(fd)
        finally:
            os.close(fd)

    def collect(self) -> int:
        """Removes layers that no image has and what broken-off imports left; returns how many trees.

        Raises ImageError while something is imported: what that needs has no name yet.
        """
        try:
            with self._locked("importing", fcntl.LOCK_EX | fcntl.LOCK_NB), self._changing(), self._named():
                self._forget_unnamed()
                used = {layer.directory for image in self.images() for layer in image.layers}
                doomed = [path for path in self.layers.iterdir() if path.name not in used]
                doomed += (self.root / "partial").iterdir()
                for path in doomed:
                    remove(path)
                return sum(path.suffix != ".lock" for path in doomed)
        except BlockingIOError:
            raise ImageError(
                f"an import into {self.root} is under way; try again when it has ended"
            ) from None

    def _forget_unnamed(self) -> None:
        """Images whose name now names another, unless sandboxes use them still."""
        names = set(self.names().values())
        for image_id in self._ids():
            if image_id in names:
                continue
            with self._unused(image_id) as unused:
                if unused:
                    self._record(image_id).unlink(missing_ok=True)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(path: Path) -> None:
    """Removes a tree, however deep; nothing when it is gone."""
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_tree(parent, path.name)
    finally:
        os.close(parent)
