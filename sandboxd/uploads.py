"""Calls that carry data to the daemon: their messages, and how one that fails is ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sandboxd.errors import InvalidRequest
from sandboxd.telemetry.recorder import annotate
from sandboxd.types import SANDBOX_PREFIX
from sandboxd.v1 import sandbox_service_pb2 as pb

Upload = pb.WriteFileRequest | pb.UploadTreeRequest
# Metadata of an upload that has failed, and how long its caller may take to stop sending.
STOPPED = "sandboxd-stopped"
LINGER_SECONDS = 5.0


class Incoming:
    """The messages of an upload. Waiting for one may be given up and taken up again: gRPC's own iterator ends
    when a wait on it is cancelled.
    """

    def __init__(self, requests: AsyncIterator[Upload]) -> None:
        self._requests = aiter(requests)
        self._coming: asyncio.Task[Upload | None] | None = None

    async def next(self) -> Upload | None:
        """None at the end."""
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._requests, None))
        message = await asyncio.shield(self._coming)
        self._coming = None
        return message

    async def data(self) -> AsyncIterator[bytes]:
        """What the messages after the first carry. Raises InvalidRequest."""
        while (message := await self.next()) is not None:
            if message.WhichOneof("payload") != "data":
                raise InvalidRequest("only the first message of an upload may carry `target`")
            yield message.data

    async def close(self) -> None:
        """Gives the wait up for good."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait([self._coming])


@contextlib.asynccontextmanager
async def upload(
    requests: AsyncIterator[Upload], context: Any
) -> AsyncIterator[tuple[Any, AsyncIterator[bytes]]]:
    """Yields what the first message of an upload names, and the data. After an error in the block the caller
    is told to send no more, and what it sends meanwhile is dropped: a status that crosses data can be lost.
    """
    incoming = Incoming(requests)
    try:
        first = await incoming.next()
        if first is None or first.WhichOneof("payload") != "target":
            raise InvalidRequest("the first message of an upload must carry `target`")
        target = first.target
        path = target.path.decode(errors="replace")
        annotate({"sandboxd.sandbox": target.name.removeprefix(SANDBOX_PREFIX), "file.path": path})
        yield target, incoming.data()
    except Exception:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await context.send_initial_metadata([(STOPPED, "1")])
                while await incoming.next() is not None:
                    pass
        raise
    finally:
        await incoming.close()
