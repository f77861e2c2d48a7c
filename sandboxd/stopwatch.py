"""How long each phase of a start takes, as whoever does it says. Pure: the caller's clock tells the time.

A start goes through several layers: the pool begins it, the starter attempts it, a backend makes the sandbox.
They have its task in common, so the watch goes with the task's context: `enter` needs none, and does nothing
where no start is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from sandboxd.errors import Phase
from sandboxd.types import StartPhases


class Stopwatch:
    """Of one start. All times are in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._first: float | None = None
        self._retry = 0.0
        self._attempts = 0
        self._spans: dict[Phase, float] = {}
        self._phase: Phase | None = None
        self._since = 0.0

    def attempt(self) -> None:
        """Another attempt begins: all the time before it has gone into retries."""
        now = self._now()
        if self._first is None:
            self._first = now
        self._retry, self._attempts = now - self._first, self._attempts + 1
        self._spans, self._phase = {}, None

    def enter(self, phase: Phase) -> None:
        """From now on it is in this phase; one that is entered again goes on where it left off."""
        now = self._now()
        self._leave(now)
        self._phase, self._since = phase, now

    def read(self) -> StartPhases:
        """What it took so far."""
        now = self._now()
        self._leave(now)
        self._since = now
        spans = {phase.value: seconds for phase, seconds in self._spans.items()}
        return StartPhases(attempts=max(1, self._attempts), retry=self._retry, **spans)

    def _leave(self, now: float) -> None:
        if self._phase is not None:
            self._spans[self._phase] = self._spans.get(self._phase, 0.0) + now - self._since


_running: ContextVar[Stopwatch | None] = ContextVar("the start that this task is at", default=None)


class timed:  # noqa: N801 - used as a function; a generator would cost each start three times as much
    """While the block runs, what it awaits is one start."""

    __slots__ = ("_token", "_watch")

    def __init__(self, now: Callable[[], float]) -> None:
        self._watch = Stopwatch(now)

    def __enter__(self) -> Stopwatch:
        self._token = _running.set(self._watch)
        return self._watch

    def __exit__(self, *_: object) -> None:
        _running.reset(self._token)


def attempt() -> None:
    """Another attempt at the start begins."""
    if (watch := _running.get()) is not None:
        watch.attempt()


def enter(phase: Phase) -> None:
    """The start is in this phase from now on: pull, create, start, ready or setup."""
    if (watch := _running.get()) is not None:
        watch.enter(phase)
