"""Reads what an image can be imported from: `docker save`'s archive, an OCI archive, a root file system.

Nothing of an archive is believed: every digest is computed anew, and what a manifest names must be in the
archive itself.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from sandboxd.images.store import LAYER_LIMIT, ImageError

PIECE_BYTES = 1 << 20
MANIFEST_BYTES = 8 << 20
"""No manifest is larger; what claims to be is not read."""
ZSTANDARD = b"\x28\xb5\x2f\xfd"
OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True, slots=True)
class LayerArchive:
    """A layer's tar archive, compressed or not. `digest` is that of its uncompressed bytes, as claimed."""

    digest: str
    open: Callable[[], IO[bytes]]

    def pieces(self) -> Iterator[bytes]:
        """Its uncompressed bytes. Raises ImageError when they are not what the digest says."""
        digest = hashlib.sha256()
        for piece in uncompressed(self.open, f"layer {self.digest[:12]}"):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != self.digest:
            raise ImageError(f"layer {self.digest[:12]} is damaged: its digest is {digest.hexdigest()[:12]}")


@dataclass(frozen=True, slots=True)
class ImageArchive:
    """Layers from the lowest to the highest, and the environment that the image gives its commands."""

    layers: tuple[LayerArchive, ...]
    env: dict[str, str] = field(default_factory=dict)


def read_archive(path: Path) -> ImageArchive:
    """What lies in the file at `path`, which must stay there. Raises ImageError."""
    try:
        with path.open("rb"), tarfile.open(path, "r:*") as archive:
            first = {member.name.removeprefix("./").rstrip("/") for member in _first(archive)}
            index = {} if first.isdisjoint(("manifest.json", "index.json")) else _index(archive)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror or error}") from error
    except tarfile.ReadError as error:
        # The library says so once for each way to pack a tar archive, a line each.
        raise ImageError(
            f"{path} is not a tar archive, or a damaged one; give what `docker save` writes, an OCI archive"
            " or the tar of a root file system"
        ) from error
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ImageError(f"{path} is not a tar archive, or a damaged one: {error}") from error
    blobs = _Blobs(path, index)
    # `docker save` writes both since 25.0; Docker's own manifest is the simpler one.
    if "manifest.json" in index:
        return _docker_archive(blobs)
    if "index.json" in index:
        return _oci_archive(blobs)
    return _root_file_system(path)


FIRST_ENTRIES = 4096
"""Manifests of images with a hundred layers lie within so many entries; a root file system has more."""


def _first(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for _, member in zip(range(FIRST_ENTRIES), archive, strict=False):
        yield member


def _index(archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    return {member.name.removeprefix("./"): member for member in archive if not member.isdir()}


class _Blobs:
    """The files of an image archive, by name."""

    def __init__(self, path: Path, index: dict[str, tarfile.TarInfo]) -> None:
        self._path = path
        self._index = index

    def json(self, name: str) -> Any:
        """A manifest. Raises ImageError."""
        member = self._member(name)
        if not member.isreg() or member.size > MANIFEST_BYTES:
            raise ImageError(f"{self._path}: {name} is no file of at most {MANIFEST_BYTES} bytes")
        with self.open(name) as file:
            try:
                return json.loads(file.read())
            except ValueError as error:
                raise ImageError(f"{self._path}: {name} is not JSON: {error}") from error

    def blob(self, digest: str) -> str:
        """The name of the file with this digest. Raises ImageError."""
        algorithm, _, digits = digest.partition(":")
        name = f"blobs/{algorithm}/{digits}"
        self._member(name)
        return name

    def open(self, name: str) -> IO[bytes]:
        archive = tarfile.open(self._path, "r:*")  # noqa: SIM115 - closed with the file
        try:
            file = archive.extractfile(self._member(name))
        except (KeyError, RecursionError):
            file = None
        if file is None:
            archive.close()
            raise ImageError(f"{self._path}: {name} is no file, or a link to none")
        return cast("IO[bytes]", _Closing(file, archive))

    def _member(self, name: str) -> tarfile.TarInfo:
        try:
            return self._index[name]
        except KeyError:
            raise ImageError(f"{self._path}: {name} is named by a manifest and missing") from None


class _Closing:
    """A file of an archive that closes the archive, too."""

    def __init__(self, file: IO[bytes], archive: tarfile.TarFile) -> None:
        self._file = file
        self._archive = archive

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        self._archive.close()

    def __enter__(self) -> IO[bytes]:
        return cast("IO[bytes]", self)

    def __exit__(self, *_: object) -> None:
        self.close()


def uncompressed(opened: Callable[[], IO[bytes]], what: str) -> Iterator[bytes]:
    """The bytes of a file that may be compressed. Raises ImageError."""
    with opened() as file:
        head = file.read(8)
        file.seek(0)
        if head.startswith(ZSTANDARD):
            raise ImageError(
                f"{what} is compressed with zstd; export it again with gzip or without compression"
            )
        opener = next((opener for magic, opener in OPENERS.items() if head.startswith(magic)), None)
        plain = opener(file) if opener is not None else file
        try:
            while piece := plain.read(PIECE_BYTES):
                yield piece
        except DECOMPRESSION_ERRORS as error:
            raise ImageError(f"{what} is damaged: {error}") from error


def _docker_archive(blobs: _Blobs) -> ImageArchive:
    images = blobs.json("manifest.json")
    try:
        if len(images) != 1:
            raise ImageError(f"the archive holds {len(images)} images; save one alone")
        config = blobs.json(images[0]["Config"])
        return _image(config, [_at(blobs, name) for name in images[0]["Layers"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"manifest.json is not what `docker save` writes: {error!r}") from error


def _oci_archive(blobs: _Blobs) -> ImageArchive:
    try:
        manifests = blobs.json("index.json")["manifests"]
        # An index may lead to another one, of an image's platforms, and that to the manifests.
        for _ in range(4):
            # What BuildKit adds of an image's making is no image.
            manifests = [entry for entry in manifests if "vnd.docker.reference.type" not in _notes(entry)]
            if len(manifests) != 1:
                raise ImageError(f"the archive holds {len(manifests)} images or platforms; export one alone")
            manifest = blobs.json(blobs.blob(manifests[0]["digest"]))
            if "layers" in manifest:
                layers = [_at(blobs, blobs.blob(layer["digest"])) for layer in manifest["layers"]]
                return _image(blobs.json(blobs.blob(manifest["config"]["digest"])), layers)
            manifests = manifest["manifests"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"index.json is not that of an OCI archive: {error!r}") from error
    raise ImageError("index.json leads to no manifest within four steps")


def _notes(entry: dict[str, Any]) -> dict[str, str]:
    return {**entry.get("annotations", {})}


def _at(blobs: _Blobs, name: str) -> Callable[[], IO[bytes]]:
    return lambda: blobs.open(name)


def _image(config: dict[str, Any], layers: list[Callable[[], IO[bytes]]]) -> ImageArchive:
    digests = [str(digest).removeprefix("sha256:") for digest in config["rootfs"]["diff_ids"]]
    if len(digests) != len(layers) or not all(_is_digest(digest) for digest in digests):
        raise ImageError(f"the image has {len(layers)} layers and {len(digests)} digests for them")
    if len(layers) > LAYER_LIMIT:
        raise ImageError(f"the image has {len(layers)} layers, at most {LAYER_LIMIT} fit; squash it")
    given = (config.get("config") or {}).get("Env") or []
    env = dict(_variable(str(pair)) for pair in given)
    return ImageArchive(tuple(map(LayerArchive, digests, layers)), env)


def _variable(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    try:
        if not name or b"\0" in os.fsencode(pair):
            raise ValueError("no name, or a NUL byte")
    except ValueError as error:
        raise ImageError(f"the image's environment has {pair!r}, which no command can be given") from error
    return name, value


def _is_digest(digits: str) -> bool:
    return len(digits) == 64 and not set(digits) - set("0123456789abcdef")


def _root_file_system(path: Path) -> ImageArchive:
    digest = hashlib.sha256()
    for piece in uncompressed(lambda: path.open("rb"), str(path)):
        digest.update(piece)
    return ImageArchive((LayerArchive(digest.hexdigest(), lambda: path.open("rb")),))
