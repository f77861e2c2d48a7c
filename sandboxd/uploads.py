"""Calls that carry data to the daemon: their messages, and how one that fails is ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from sandboxd.errors import InvalidRequest
from sandboxd.telemetry.recorder import annotate
from sandboxd.types import SANDBOX_PREFIX
from sandboxd.v1 import sandbox_service_pb2 as pb

Upload = pb.WriteFileRequest | pb.UploadTreeRequest
# Metadata of an upload that has failed, and how long its caller may take to stop sending.
STOPPED = "sandboxd-stopped"
LINGER_SECONDS = 5.0


class CutOff(Exception):
    """The call broke, was cancelled or is past its deadline: nobody waits for its answer."""


class Incoming:
    """The messages of an upload. Waiting for one may be given up and taken up again: gRPC's own iterator ends
    when a wait on it is cancelled.

    It ends, too, when the call is cut off, before the handler is cancelled. But then nothing can be sent any
    more: initial metadata, sent at the end, tells the caller's own end from that.
    """

    def __init__(self, requests: AsyncIterator[Upload], context: Any) -> None:
        self._requests = aiter(requests)
        self._context = context
        self._coming: asyncio.Task[Upload | None] | None = None
        # Initial metadata can be sent once.
        self._answered = False

    async def next(self) -> Upload | None:
        """None at the end that the caller has set. Raises CutOff."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._receive())
        message = await asyncio.shield(self._coming)
        self._coming = None
        return message

    async def _receive(self) -> Upload | None:
        message = await anext(self._requests, None)
        if message is None and not self._answered:
            await self._answer(())
        return message

    async def _answer(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._answered = True
        try:
            await self._context.send_initial_metadata(metadata)
        except grpc.aio.InternalError as error:
            raise CutOff("the upload was cut off before its end") from error

    async def data(self) -> AsyncIterator[bytes]:
        """What the messages after the first carry. Raises InvalidRequest, CutOff."""
        while (message := await self.next()) is not None:
            if message.WhichOneof("payload") != "data":
                raise InvalidRequest("only the first message of an upload may carry `target`")
            yield message.data

    async def stop(self) -> None:
        """Has the caller send no more, and drops what it sends until its end. Raises CutOff."""
        if not self._answered:
            await self._answer([(STOPPED, "1")])
            while await self.next() is not None:
                pass

    async def close(self) -> None:
        """Gives the wait up for good."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)


@contextlib.asynccontextmanager
async def upload(
    requests: AsyncIterator[Upload], context: Any
) -> AsyncIterator[tuple[Any, AsyncIterator[bytes]]]:
    """Yields what the first message of an upload names, and the data. After an error in the block the caller
    is told to send no more, and what it sends meanwhile is dropped: a status that crosses data can be lost.
    A call that is cut off is cancelled.
    """
    incoming = Incoming(requests, context)
    try:
        first = await incoming.next()
        if first is None or first.WhichOneof("payload") != "target":
            raise InvalidRequest("the first message of an upload must carry `target`")
        target = first.target
        path = target.path.decode(errors="replace")
        annotate({"sandboxd.sandbox": target.name.removeprefix(SANDBOX_PREFIX), "file.path": path})
        yield target, incoming.data()
    except CutOff:
        # What gRPC does, too, only later.
        raise asyncio.CancelledError from None
    except Exception:
        with contextlib.suppress(TimeoutError, CutOff):
            async with asyncio.timeout(LINGER_SECONDS):
                await incoming.stop()
        raise
    finally:
        await incoming.close()
