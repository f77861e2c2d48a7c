"""How a pool looks after its sandboxes, and what it remembers of those that failed. Pure values."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sandboxd.errors import Cause, Phase, SandboxdError

FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True)
class Care:
    """A pool's settings; durations in seconds.

    A sandbox that has not answered for `check_seconds` is asked before it is granted, and all are asked in
    the background about twice in that time; 0 turns both off. What failed is kept for `quarantine_seconds`,
    as far as `Bounds.quarantine_limit` allows. One sandbox is leased at most `max_uses` times, and reset in
    between.
    """

    check_seconds: float = 30.0
    quarantine_seconds: float = 600.0
    max_uses: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sandbox failed. `when` is in seconds since 1970; `attempt` counts the attempts to start it, this
    one included; `log` are the last lines that it printed, where it printed any.
    """

    sandbox: str
    phase: Phase
    cause: Cause
    message: str
    when: float
    attempt: int = 1
    log: str = ""

    @classmethod
    def of(cls, sandbox: str, error: SandboxdError, when: float, attempt: int = 1) -> Failure:
        """What an error says of a sandbox."""
        phase, log = error.phase or Phase.READY, error.metadata.get("log", "")
        return cls(sandbox, phase, error.cause, error.message, when, attempt, log)


class Failures:
    """The last hundred of a pool, the oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Failure] = deque(maxlen=FAILURES_KEPT)

    def add(self, failure: Failure) -> None:
        """The oldest is forgotten where it is one too many."""
        self._kept.append(failure)

    def all(self) -> list[Failure]:
        """The oldest first."""
        return list(self._kept)

    def last_of(self, sandbox_id: str) -> Failure | None:
        """Why it failed last, if that is still known."""
        return next((each for each in reversed(self._kept) if each.sandbox == sandbox_id), None)
