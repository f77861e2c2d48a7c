"""The files of a fake sandbox: plain files of this user, read and written by the guest's own code."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

from sandboxd.backends.guest_files import failure, to_info
from sandboxd.backends.sweeper import remove_tree
from sandboxd.guest import files, packing, wire
from sandboxd.types import FileInfo


class HostFiles:
    """Implements `base.Files`; `place` says where a path of the sandbox lies here, or raises."""

    def __init__(self, place: Callable[[bytes], bytes]) -> None:
        self._place = place

    async def write(self, path: bytes, data: AsyncIterator[bytes], mode: int) -> int:
        """See `base.Files`."""
        with _failures(path):
            return await _fill(files.FileSink(self._place(path), mode), data)

    async def unpack(self, path: bytes, archive: AsyncIterator[bytes]) -> int:
        """See `base.Files`."""
        with _failures(path):
            return await _fill(packing.Unpacker(self._place(path)), archive)

    async def read(self, path: bytes, *, offset: int = 0, limit: int | None = None) -> AsyncIterator[bytes]:
        """See `base.Files`."""
        for piece in _drawn(path, files.read(self._place(path), offset, -1 if limit is None else limit)):
            yield piece

    async def pack(self, path: bytes) -> AsyncIterator[bytes]:
        """See `base.Files`."""
        for piece in _drawn(path, packing.pack(self._place(path))):
            yield piece

    async def list_directory(self, path: bytes) -> AsyncIterator[FileInfo]:
        """See `base.Files`."""
        for piece in _drawn(path, files.list_directory(self._place(path))):
            for info in wire.Info.unpack_all(piece):
                yield to_info(info)

    async def stat(self, path: bytes) -> FileInfo:
        """See `base.Files`."""
        (info,) = wire.Info.unpack_all(b"".join(_drawn(path, files.describe(self._place(path)))))
        return to_info(info)

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        """See `base.Files`."""
        for _ in _drawn(path, files.remove(self._place(path), recursive)):
            pass


def remove_all(directory: Path) -> None:
    """Removes it with all that a sandbox put there, as far as that can be removed. Blocks."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except RecursionError:
        # It is deeper than Python's stack.
        parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                remove_tree(parent, directory.name)
        finally:
            os.close(parent)


async def _fill(sink: files.FileSink | packing.Unpacker, data: AsyncIterator[bytes]) -> int:
    try:
        async for piece in data:
            sink.feed(piece)
        return sink.finish()
    finally:
        sink.abandon()


def _drawn(path: bytes, pieces: Generator[bytes, None, None]) -> Iterator[bytes]:
    with _failures(path), contextlib.closing(pieces):
        yield from pieces


@contextlib.contextmanager
def _failures(path: bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(path, error.errno or 0, error.strerror or os.strerror(error.errno or 0)) from error
