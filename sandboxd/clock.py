"""Time as an argument, so that tests of expiry and back-off neither sleep nor flake."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Clock(Protocol):
    """A clock that only goes forward, in seconds from an arbitrary start, and the calendar beside it."""

    def now(self) -> float: ...

    def wall(self) -> float:
        """Seconds since 1970, for timestamps that leave the process."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Cancels the block after `seconds` and raises TimeoutError out of it."""
        ...


class MonotonicClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)


class ManualClock:
    """A clock that stands still until `advance` is called; deadlines then come up in their order."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._deadlines: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at(seconds, lambda: None if future.done() else future.set_result(None))
        await future

    @contextlib.asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[object]:
        inside = True
        async with asyncio.timeout(None) as scope:
            self._at(seconds, lambda: scope.reschedule(0.0) if inside else None)
            try:
                yield scope
            finally:
                inside = False

    def advance(self, seconds: float) -> None:
        """Moves the clock and wakes whoever's deadline has come."""
        self._now += seconds
        while self._deadlines and self._deadlines[0][0] <= self._now:
            heapq.heappop(self._deadlines)[2]()

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._deadlines, (self._now + max(0.0, seconds), next(self._order), act))
