"""How late the daemon's event loop is: every call waits for it, whatever the call itself takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

LOOP_LAG = "sandboxd.loop.lag"
# Often enough to meet a turn that holds up calls, and seldom enough to cost nothing.
INTERVAL_SECONDS = 0.1


class _Handle(Protocol):
    def cancel(self) -> None: ...


class Loop(Protocol):
    """What is asked of an event loop."""

    def time(self) -> float:
        """Its clock, in seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> _Handle:
        """Calls back at that time, or as soon as the loop comes to it."""
        ...


@contextlib.contextmanager
def measured(loop: Loop, told: Callable[[float], None]) -> Iterator[None]:
    """While the block runs `told` hears, ten times a second, by how many seconds the loop was late."""

    def begin() -> _Handle:
        due = loop.time() + INTERVAL_SECONDS
        return loop.call_at(due, lambda: look(due))

    def look(due: float) -> None:
        told(max(0.0, loop.time() - due))
        waiting[0] = begin()

    waiting = [begin()]
    try:
        yield
    finally:
        waiting[0].cancel()
