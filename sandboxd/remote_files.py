"""What a client does with the files of a sandbox that it has leased."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from sandboxd import replies
from sandboxd.errors import FileFailed
from sandboxd.guest import packing
from sandboxd.guest.packing import Refused
from sandboxd.lifetime import in_thread
from sandboxd.requests import Word, as_bytes, host_path, in_pieces, message
from sandboxd.status import translated
from sandboxd.types import FileInfo
from sandboxd.unpacking import GuardedUnpacker
from sandboxd.v1 import sandbox_service_pb2 as pb

Result = TypeVar("Result")


class RemoteFiles:
    """The file calls of `Box`. Relative paths start at the sandbox's working directory.

    All raise FileNotFound, FileFailed (the message names the fault), SandboxLost, LeaseExpired.
    """

    def __init__(self, stub: Any, name: str) -> None:
        self.name = name
        self._stub = stub

    async def write_file(self, path: Word, data: bytes | AsyncIterable[bytes], *, mode: int = 0o644) -> int:
        """Replaces a file atomically; returns its size in bytes. What comes piece by piece is sent so."""
        target = message(pb.WriteFileRequest.Target, name=self.name, path=as_bytes(path), mode=mode)

        async def messages() -> AsyncIterator[pb.WriteFileRequest]:
            yield pb.WriteFileRequest(target=target)
            async for part in data if isinstance(data, AsyncIterable) else _one(data):
                for piece in in_pieces(part):
                    yield pb.WriteFileRequest(data=piece)

        size: int = (await _upload(self._stub.WriteFile(), messages())).size_bytes
        return size

    async def read_file(self, path: Word, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Reads a file, or `limit` bytes of it from `offset` on."""
        return b"".join([piece async for piece in self.read_pieces(path, offset=offset, limit=limit)])

    async def read_pieces(
        self, path: Word, *, offset: int = 0, limit: int | None = None
    ) -> AsyncIterator[bytes]:
        """As `read_file`, piece by piece: for what is too large to be held."""
        target = as_bytes(path)
        request = message(
            pb.ReadFileRequest, name=self.name, path=target, offset=offset, limit_bytes=limit or 0
        )
        async for piece in _data(self._stub.ReadFile(request)):
            yield piece

    async def stat_file(self, path: Word) -> FileInfo:
        """What is at a path; a symbolic link there is not followed."""
        with translated():
            reply = await self._stub.StatFile(pb.StatFileRequest(name=self.name, path=as_bytes(path)))
        return replies.file_info(reply)

    async def list_files(self, path: Word = b".") -> list[FileInfo]:
        """What a directory holds, sorted by name."""
        found = []
        with translated():
            async for reply in self._stub.ListFiles(pb.ListFilesRequest(name=self.name, path=as_bytes(path))):
                found += [replies.file_info(file) for file in reply.files]
        return found

    async def remove_file(self, path: Word, *, recursive: bool = False) -> None:
        """Removes a file, a symbolic link or a directory, with all it holds if `recursive`."""
        request = pb.RemoveFileRequest(name=self.name, path=as_bytes(path), recursive=recursive)
        with translated():
            await self._stub.RemoveFile(request)

    async def upload_archive(self, archive: AsyncIterable[bytes], path: Word = b".") -> int:
        """Unpacks a tar archive into a directory, made if missing; returns how many entries it had."""
        target = pb.UploadTreeRequest.Target(name=self.name, path=as_bytes(path))

        async def messages() -> AsyncIterator[pb.UploadTreeRequest]:
            yield pb.UploadTreeRequest(target=target)
            async for data in archive:
                for piece in in_pieces(data):
                    yield pb.UploadTreeRequest(data=piece)

        count: int = (await _upload(self._stub.UploadTree(), messages())).entry_count
        return count

    async def download_archive(self, path: Word = b".") -> AsyncIterator[bytes]:
        """Yields a tar archive of a directory, names relative to it."""
        request = pb.DownloadTreeRequest(name=self.name, path=as_bytes(path))
        async for piece in _data(self._stub.DownloadTree(request)):
            yield piece

    async def upload_tree(self, source: Path, path: Word = b".") -> int:
        """Copies what a directory of this host holds into one of the sandbox; returns the number of entries.

        Modes, times, symbolic and hard links come along; owners do not. Raises OSError for what cannot be
        read.
        """
        root = host_path(source)

        async def archive() -> AsyncIterator[bytes]:
            with contextlib.closing(packing.pack(root)) as pieces:
                while (piece := await in_thread(next, pieces, None)) is not None:
                    yield piece

        return await self.upload_archive(archive(), path)

    async def download_tree(self, path: Word, target: Path) -> None:
        """Copies what a directory of the sandbox holds into `target`, made if missing.

        The sandbox is not trusted: names and links that lead out of `target`, or may, are refused with
        FileFailed, and so are pipes, devices and what is no archive. Raises OSError for what cannot be
        written.
        """
        unpacker = await in_thread(GuardedUnpacker, host_path(target))
        try:
            async for piece in self.download_archive(path):
                await in_thread(unpacker.feed, piece)
            await in_thread(unpacker.finish)
        except Refused as error:
            raise FileFailed(f"{os.fsdecode(as_bytes(path))!r}: {error.strerror}") from error
        finally:
            unpacker.abandon()


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _upload(call: Any, messages: AsyncIterator[Any]) -> Any:
    """Sends the messages and returns the reply, or raises what the daemon or `messages` raised.

    A daemon that cannot go on says so in its initial metadata and waits for the end of what is sent: when a
    call ends while a message is on its way, the library may put an error of its own in the status's place.
    """
    stopped = asyncio.ensure_future(call.initial_metadata())
    try:
        with translated():
            while (message := await _next(messages, stopped)) is not None:
                if not await _sent(call.write(message)):
                    break
            await _sent(call.done_writing())
            return await call
    finally:
        call.cancel()
        stopped.cancel()
        await asyncio.wait([stopped])


async def _next(messages: AsyncIterator[Any], stopped: asyncio.Future[Any]) -> Any:
    """The next message, or None at their end or when no more are wanted."""
    coming = asyncio.ensure_future(anext(messages, None))
    try:
        await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopped.done() else coming.result()
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


async def _sent(sending: Awaitable[None]) -> bool:
    """False once the call has ended, which its status tells."""
    try:
        await sending
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.InternalError):
        return False
    return True


async def _data(call: Any) -> AsyncIterator[bytes]:
    """The pieces that a call yields; leaving the iterator ends the call."""
    try:
        with translated():
            async for reply in call:
                yield reply.data
    finally:
        call.cancel()
