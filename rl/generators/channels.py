"""How new weights reach a vLLM server: what its update is told, and what must happen before and beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from rl.generators.calls import Calls
from rl.generators.checks import segment_identity


class Delivery(Protocol):
    """One version on its way to one server."""

    async def begin(self) -> dict[str, Any]:
        """What `/update_weights` is to be given; called once the server is paused. Raises UpdateFailed."""
        ...


class Channel(Protocol):
    """Brings weights to servers."""

    def delivery(
        self, calls: Calls, path: Path, version: int
    ) -> AbstractAsyncContextManager[Delivery, bool | None]:
        """Brings the version that the segment `path` holds. The server draws until the block is entered, and
        is updated within it. Raises UpdateFailed (it goes on with what it has), GeneratorDead."""
        ...

    def forget(self, calls: Calls) -> None:
        """This server takes no part in what is under way, and is not waited for."""
        ...


class SegmentChannel:
    """The server maps the trainer's memory: it is told where that is, and then which version to take."""

    def __init__(self) -> None:
        self._segment: tuple[int, int] | None = None

    @asynccontextmanager
    async def delivery(self, calls: Calls, path: Path, version: int) -> AsyncIterator[Delivery]:
        segment = await asyncio.to_thread(segment_identity, path)
        if segment != self._segment:
            await calls.before("/init_weight_transfer_engine", {"init_info": {"path": str(path)}})
            self._segment = segment
        yield _FromSegment(version)

    def forget(self, calls: Calls) -> None:
        """Nobody waits for it."""


class _FromSegment:
    def __init__(self, version: int) -> None:
        self._version = version

    async def begin(self) -> dict[str, Any]:
        return {"version": self._version}
