"""The files of a sandbox through its guest: each call one connection, and no trust in what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from sandboxd.backends.channel import Channel
from sandboxd.errors import FileFailed, FileNotFound, Phase
from sandboxd.guest import wire
from sandboxd.types import FileInfo, FileKind

KINDS = {
    wire.REGULAR: FileKind.FILE,
    wire.DIRECTORY: FileKind.DIRECTORY,
    wire.SYMLINK: FileKind.SYMLINK,
    wire.OTHER: FileKind.OTHER,
}


class GuestFiles:
    """Implements `base.Files`; `channel` opens a connection, `absolute` completes a path."""

    def __init__(
        self,
        channel: Callable[[Phase], AbstractAsyncContextManager[Channel]],
        absolute: Callable[[bytes], bytes],
    ) -> None:
        self._channel = channel
        self._absolute = absolute

    async def write(self, path: bytes, data: AsyncIterator[bytes], mode: int) -> int:
        """See `base.Files`."""
        fields = wire.WRITE_FIELDS.pack(mode)
        return await self._send(path, wire.frame(wire.WRITE, fields, self._absolute(path)), data)

    async def unpack(self, path: bytes, archive: AsyncIterator[bytes]) -> int:
        """See `base.Files`."""
        return await self._send(path, wire.frame(wire.UNPACK, self._absolute(path)), archive)

    async def read(self, path: bytes, *, offset: int = 0, limit: int | None = None) -> AsyncIterator[bytes]:
        """See `base.Files`."""
        fields = wire.READ_FIELDS.pack(offset, -1 if limit is None else limit)
        left = limit
        async with self._asked(wire.frame(wire.READ, fields, self._absolute(path))) as channel:
            async for piece in _pieces(channel, path):
                left = None if left is None else left - len(piece)
                if left is not None and left < 0:
                    raise wire.Malformed("more of a file than was asked for")
                yield piece

    async def pack(self, path: bytes) -> AsyncIterator[bytes]:
        """See `base.Files`."""
        async with self._asked(wire.frame(wire.PACK, self._absolute(path))) as channel:
            async for piece in _pieces(channel, path):
                yield piece

    async def list_directory(self, path: bytes) -> AsyncIterator[FileInfo]:
        """See `base.Files`."""
        async with self._asked(wire.frame(wire.LIST, self._absolute(path))) as channel:
            async for piece in _pieces(channel, path):
                for info in wire.Info.unpack_all(piece):
                    yield to_info(info)

    async def stat(self, path: bytes) -> FileInfo:
        """See `base.Files`."""
        async with self._asked(wire.frame(wire.STAT, self._absolute(path))) as channel:
            described: FileInfo | None = None
            async for piece in _pieces(channel, path):
                found = wire.Info.unpack_all(piece)
                if described is not None or len(found) != 1:
                    raise wire.Malformed("more than one description of a path")
                described = to_info(found[0])
            if described is None:
                raise wire.Malformed("no description of a path")
            return described

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        """See `base.Files`."""
        request = wire.frame(wire.REMOVE, wire.REMOVE_FIELDS.pack(recursive), self._absolute(path))
        async with self._asked(request) as channel:
            async for _ in _pieces(channel, path):
                raise wire.Malformed("data in answer to a removal")

    @contextlib.asynccontextmanager
    async def _asked(self, request: bytes) -> AsyncIterator[Channel]:
        async with self._channel(Phase.FILE) as channel:
            await channel.send(request)
            yield channel

    async def _send(self, path: bytes, request: bytes, data: AsyncIterator[bytes]) -> int:
        """Sends data to its end, or until an early reply, which is an error; returns the reply's count."""
        async with self._asked(request) as channel:
            reply = asyncio.ensure_future(channel.frame())
            sending = asyncio.ensure_future(_send_pieces(channel, data))
            try:
                await asyncio.wait({reply, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                kind, payload = await reply
            finally:
                for task in (reply, sending):
                    task.cancel()
                await asyncio.wait({reply, sending})
            if kind == wire.DONE and len(payload) == wire.OFFSET.size:
                count: int = wire.OFFSET.unpack(payload)[0]
                if count <= wire.LARGEST:
                    return count
            raise _error(path, kind, payload)


async def _pieces(channel: Channel, path: bytes) -> AsyncIterator[bytes]:
    """The data of a reply, up to its end."""
    while True:
        kind, piece = await channel.frame()
        if kind != wire.DATA:
            raise _error(path, kind, piece)
        if not piece:
            return
        yield piece


async def _send_pieces(channel: Channel, data: AsyncIterator[bytes]) -> None:
    async for piece in data:
        for start in range(0, len(piece), wire.PIECE):
            await channel.send(wire.frame(wire.DATA, piece[start : start + wire.PIECE]))
    await channel.send(wire.frame(wire.DATA))


def _error(path: bytes, kind: int, payload: bytes) -> FileNotFound | FileFailed:
    if kind != wire.ERROR or len(payload) < wire.ERROR_FIELDS.size:
        raise wire.Malformed(f"frame {kind} is no answer to a file request")
    (number,) = wire.ERROR_FIELDS.unpack_from(payload)
    return failure(path, number, payload[wire.ERROR_FIELDS.size :][:1024].decode(errors="replace"))


def failure(path: bytes, number: int, message: str) -> FileNotFound | FileFailed:
    """What to raise for an errno; `message` says more, or the same in words."""
    name = os.fsdecode(path)
    if number == errno.ENOENT:
        more = "" if message == os.strerror(number) else f": {message}"
        return FileNotFound(f"no such file: {name!r}{more}")
    code = errno.errorcode.get(number, str(number))
    return FileFailed(f"{name!r}: {message} ({code})", metadata={"errno": code})


def to_info(info: wire.Info) -> FileInfo:
    """A guest's description in the daemon's own form."""
    return FileInfo(info.name, KINDS[info.kind], info.size, info.mode, info.mtime_ns / 1e9, info.target)
