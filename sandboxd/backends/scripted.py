"""Commands that only say that they ran, for the fake backend: they take a scripted time of its clock."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sandboxd.clock import Clock
from sandboxd.types import Event, Exited, ExitReason, Started, Stdout


@dataclass(frozen=True, slots=True)
class Answer:
    """How a scripted command ends: after `seconds`, with this output and exit code."""

    seconds: float = 0.0
    stdout: bytes = b""
    exit_code: int = 0


class ScriptedExecution:
    """Implements `base.Execution`; what it is told is dropped."""

    def __init__(self, answer: Answer, timeout: float | None, clock: Clock) -> None:
        self._answer = answer
        self._timeout = timeout
        self._clock = clock

    async def __aiter__(self) -> AsyncIterator[Event]:
        yield Started()
        answer, limit = self._answer, self._timeout
        if limit is not None and answer.seconds > limit:
            await self._clock.sleep(limit)
            yield Exited(ExitReason.TIMED_OUT, wall=limit)
            return
        await self._clock.sleep(answer.seconds)
        if answer.stdout:
            yield Stdout(answer.stdout, 0)
        yield Exited(ExitReason.EXITED, answer.exit_code, wall=answer.seconds)

    async def write(self, data: bytes) -> None:
        """Reads nothing."""

    async def end_input(self) -> None:
        """Reads nothing."""

    async def signal(self, number: int) -> None:
        """Hears nothing."""

    async def resize(self, rows: int, columns: int) -> None:
        """Has no terminal."""


@contextlib.asynccontextmanager
async def scripted(answer: Answer, timeout: float | None, clock: Clock) -> AsyncIterator[ScriptedExecution]:
    """A command that is nothing but its answer; leaving the context ends it."""
    yield ScriptedExecution(answer, timeout, clock)
