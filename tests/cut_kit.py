"""Cancels a coroutine at its n-th wait, for n from one to the last: no moment is left out or left to luck."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any


class Moment(enum.Enum):
    """When a wait is cut: while it lasts; when it is over and nobody has heard so; while it lasts, and then
    the next wait as well, that of whatever cleans up.
    """

    BEFORE = enum.auto()
    AFTER = enum.auto()
    TWICE = enum.auto()


class Cut:
    """Awaits `inner`; `strikes` counts how often it was cancelled."""

    def __init__(self, inner: Coroutine[Any, Any, Any], wait: int, moment: Moment) -> None:
        self.strikes = 0
        self._inner = inner
        self._moment = moment
        self._last = wait + 1 if moment is Moment.TWICE else wait
        self._cut_at = range(wait, self._last + 1)

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._inner.__await__()
        error: BaseException | None = None
        number = 0
        while True:
            try:
                waited = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            number += 1
            if number in self._cut_at:
                self._strike(waited)
            error = None
            try:
                yield waited
            except BaseException as raised:  # noqa: BLE001 - it is the inner one's to deal with
                error = raised

    def _strike(self, waited: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.strikes += 1
        if self._moment is Moment.AFTER and waited is not None:
            # Called before the task goes on: the cancellation comes between the end of the wait and that.
            waited.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()


async def sweep(
    make: Callable[[], Coroutine[Any, Any, Any]], moment: Moment, check: Callable[[int], Awaitable[None]]
) -> int:
    """Runs what `make` makes again and again, cut at its first wait, its second, and so on until one run has
    fewer waits; `check` is called with the number after each. Returns how many runs were cut.
    """
    number = 0
    while True:
        number += 1
        cut = Cut(make(), number, moment)
        running = asyncio.ensure_future(_awaited(cut))
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()
        await check(number)
        if not cut.strikes:
            return number - 1


async def _awaited(cut: Cut) -> None:
    await cut
