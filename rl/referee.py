"""Asks a task's verifier, outside or inside the sandbox, within a time limit and off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from rl.boxes import Box
from rl.side_loop import SideLoop, TaskLoop
from rl.tasks.sandboxed import Sandboxed
from rl.threads import CallFailed, in_own_thread
from rl.tracing import part
from rl.types import Task
from sandboxd.errors import SandboxdError

Verify = Callable[[Task, str], float]
_T = TypeVar("_T")

log = logging.getLogger(__name__)


class VerifierFailed(RuntimeError):
    """A task's own code raised, took too long or gave no reward: nothing is known about the answer.

    `stage` is `prepare` or `verify`; `timed_out` says whether it was the time.
    """

    def __init__(self, message: str, stage: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.stage = stage
        self.timed_out = timed_out


class Judge(Protocol):
    """What `rl.tasks.TaskSource` offers."""

    def verify(self, task: Task, answer: str) -> float: ...

    def sandboxed(self, task: Task) -> Sandboxed | None: ...


class Referee:
    """`seconds` bounds each call of a task's code. A plain function is a judge that needs no sandbox."""

    def __init__(self, judge: Judge | Verify, seconds: float, side: TaskLoop | None = None) -> None:
        self._judge = None if callable(judge) else judge
        self._verify: Verify = judge if callable(judge) else judge.verify
        self._seconds = seconds
        self._side = side or SideLoop()

    def sandboxed(self, task: Task) -> Sandboxed | None:
        """The task's family when it is judged in the sandbox."""
        return None if self._judge is None else self._judge.sandboxed(task)

    async def prepare(self, task: Task, box: Box) -> None:
        """Sets a fresh sandbox up. Raises VerifierFailed, SandboxdError."""
        family = self.sandboxed(task)
        if family is not None:
            await self._bounded(task, "prepare", self._side.call(partial(family.prepare, task), box))

    async def verify(self, task: Task, answer: str) -> float:
        """The reward of an answer, from the task's verifier in a thread. Raises VerifierFailed."""
        call = in_own_thread(lambda: float(self._verify(task, answer)))
        return _checked(task, await self._bounded(task, "verify", call))

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        """The reward of an episode, found in its sandbox. Raises VerifierFailed, SandboxdError."""
        family = self.sandboxed(task)
        if family is None:
            raise AssertionError(f"the family of {task.key} is not judged in the sandbox")
        call = self._side.call(partial(family.judge, task, answer), box)
        return _checked(task, float(await self._bounded(task, "verify", call)))

    async def _bounded(self, task: Task, stage: str, call: Awaitable[_T]) -> _T:
        try:
            with part(stage):
                async with asyncio.timeout(self._seconds) as bound:
                    return await call
        except SandboxdError:
            raise
        except Exception as error:
            if isinstance(error.__cause__, SandboxdError):
                raise error.__cause__ from None
            if isinstance(error, TimeoutError) and bound.expired():
                self._side.renew()
                text = f"{task.family} took longer than {self._seconds:g} s to {stage}"
                raise VerifierFailed(text, stage, timed_out=True) from error
            cause = error.__cause__ if isinstance(error, CallFailed) else error
            log.warning("the code of task %s failed in %s", task.key, stage, exc_info=cause)
            name = type(cause).__name__
            raise VerifierFailed(f"{task.family}: {name}: {_line(cause)}", stage) from cause


def _checked(task: Task, reward: float) -> float:
    if not 0.0 <= reward <= 1.0:
        raise VerifierFailed(f"{task.family} gave {reward}; a reward lies in [0, 1]", "verify")
    return reward


def _line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]
