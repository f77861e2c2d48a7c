"""One wake-up call of many: the earliest that anybody has asked for."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable

from sandboxd.clock import Clock
from sandboxd.lifetime import first_of


class Soon:
    """Calls `ring` once in the next turn of the event loop, however often it is set until then.

    In a crowd, where it was set so many times within the last `apart` seconds, two calls are at least so far
    apart. That is of the loop's own time.
    """

    def __init__(self, ring: Callable[[], None], apart: float = 0.0, crowd: int = 1) -> None:
        self._ring = ring
        self._apart = apart
        self._last = -math.inf
        self._set = deque([-math.inf] * crowd, maxlen=crowd)
        self._is_set = False

    def set(self) -> None:
        """Rings soon."""
        loop = asyncio.get_running_loop()
        now, first = loop.time(), self._set[0]
        self._set.append(now)
        if self._is_set:
            return
        self._is_set = True
        due = self._last + self._apart
        if now - first < self._apart and now < due:
            loop.call_at(due, self._go)
        else:
            loop.call_soon(self._go)

    def _go(self) -> None:
        self._is_set = False
        self._last = asyncio.get_running_loop().time()
        self._ring()


class Together:
    """Calls `act` once for all who have asked for it: as `Soon` does."""

    def __init__(self, act: Callable[[], None], apart: float = 0.0, crowd: int = 1) -> None:
        self._act = act
        self._soon = Soon(self._go, apart, crowd)
        self._waiting: list[asyncio.Future[None]] = []

    def done(self) -> asyncio.Future[None]:
        """Done when `act` was called, or has its error."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._soon.set()
        return waiter

    def _go(self) -> None:
        # Else `now` was faster.
        if self._waiting:
            self.now()

    def now(self) -> None:
        """Calls `act` at once, also for those who have asked for it."""
        waiting, self._waiting = self._waiting, []
        try:
            self._act()
        except BaseException as error:
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_exception(error)
            raise
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class Lull:
    """Calls `ring` once in the next lull: when it was not set for `quiet` seconds, at the latest `longest`
    seconds after it was first set. For work that may wait while others are served, on the loop's own time.
    """

    def __init__(self, ring: Callable[[], None], quiet: float, longest: float) -> None:
        self._ring = ring
        self._quiet, self._longest = quiet, longest
        self._first = self._last = 0.0
        self._next: asyncio.Handle | None = None

    def set(self) -> None:
        """Rings in the next lull."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        if self._next is None:
            self._first = self._last
            self._next = loop.call_later(self._quiet, self._look)

    def cancel(self) -> None:
        """Does not ring before it is set again."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _look(self) -> None:
        # What has arrived while this process did not run has its turn first: that was no lull.
        self._next = asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        loop = asyncio.get_running_loop()
        at = min(self._last + self._quiet, self._first + self._longest)
        if loop.time() < at:
            self._next = loop.call_at(at, self._look)
        else:
            self._next = None
            self._ring()


class Alarm:
    """Calls `ring` at a time of the clock, in a task of `tasks`. It may ring without need, never too late."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._at: float | None = None
        self._task: asyncio.Task[None] | None = None

    def set(self, at: float, tasks: asyncio.TaskGroup) -> None:
        """Rings at this time, in seconds, unless it rings before; whoever needs it again asks again."""
        if self._at is not None and self._at <= at:
            return
        self.cancel()
        self._at = at
        self._task = tasks.create_task(self._wait(at), name="alarm")

    def cancel(self) -> None:
        """Does not ring."""
        if self._task:
            self._task.cancel()
        self._at = self._task = None

    async def _wait(self, at: float) -> None:
        await self._clock.sleep(at - self._clock.now())
        self._at = self._task = None
        self._ring()


async def until(deadline: float | None, clock: Clock, sooner: Awaitable[object]) -> None:
    """Returns when the clock has come to `deadline`, if there is one, or when `sooner` is over."""
    if deadline is None:
        await sooner
    else:
        await first_of(sooner, clock.sleep(deadline - clock.now()))
