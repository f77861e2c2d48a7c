"""Measures how late the event loop is: whatever blocks it keeps every episode waiting."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rl.beside import beside
from rl.metrics import Row

INTERVAL_SECONDS = 0.02


class LoopLag:
    """By how many seconds a callback would have been late, at moments `interval` seconds apart.

    A loop that stands still takes no measurement meanwhile. So one that is found late counts for all moments
    that it missed, each as late as it would have been: the percentiles are those of the time that passed.
    """

    def __init__(
        self, interval: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._late = array("d")
        self._due: float | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measures for the length of the block."""
        async with beside(self._measure(), "loop lag"):
            yield

    async def _measure(self) -> None:
        while True:
            self._due = self._clock() + self._interval
            await asyncio.sleep(self._interval)
            self.note(self._clock() - self._due)

    def note(self, late: float) -> None:
        """One moment's lateness in seconds."""
        late = max(late, 0.0)
        self._late.append(late)
        while (late := late - self._interval) > 0.0:
            self._late.append(late)

    def row(self) -> Row:
        """Since the last call: the 99th percentile and the most, in seconds."""
        if self._due is not None and self._clock() > self._due:
            # It is late at this very moment; the next call must not count that again.
            self.note(self._clock() - self._due)
            self._due = self._clock()
        late, self._late = sorted(self._late), array("d")
        if not late:
            return {"loop/lag_p99_s": 0.0, "loop/lag_max_s": 0.0}
        return {"loop/lag_p99_s": late[-(-len(late) * 99 // 100) - 1], "loop/lag_max_s": late[-1]}
