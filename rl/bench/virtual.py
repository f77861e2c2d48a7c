"""An event loop whose time jumps: thousands of seconds pass in one, and the same run gives the same result.

When nothing is ready to run the loop does not wait for its next timer, it moves its clock there. So all that
waits by asyncio's own means (sleeps, timeouts, locks, tasks) behaves as in real time. What waits for the
world outside cannot be simulated: a run in which nobody has a timer left would wait for ever, and raises
Stalled instead. Work for threads is done at once, in the loop's own.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Stalled(RuntimeError):
    """Every task waits for another: nothing would ever happen again."""


class _Jumping(selectors.SelectSelector):
    """Moves `now`, in seconds, on by what it was to wait for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled(f"nothing would ever happen after {self.now:.1f} virtual seconds")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time` begins at 0 and moves only while nothing is ready to run."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Calls `func` now, for nothing runs elsewhere; raises what it raises."""
        future = self.create_future()
        future.set_result(func(*args))
        return future


async def elapse(seconds: float) -> None:
    """Lets virtual time pass. Raises RuntimeError where time is real."""
    if not isinstance(asyncio.get_running_loop(), VirtualLoop):
        raise RuntimeError(f"{seconds:g} s would really pass here: run this with run_virtual")
    await asyncio.sleep(seconds)


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns, run in virtual time. Raises Stalled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
