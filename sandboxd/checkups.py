"""Asks the ready sandboxes of a pool whether they still answer: at low cost all the time, and before a grant.

A sandbox that answered within `check_seconds` is granted at once. One that did not is doubted: it is asked
first when a caller waits for it, and otherwise in its turn. In the background one is asked at a time, the one
whose answer is the oldest, when half of the seconds have passed; then comes a pause nine times as long as the
answer took, so that the questions cost at most a tenth of what one caller could do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from sandboxd.availability import Availability
from sandboxd.care import Care
from sandboxd.clock import Clock
from sandboxd.errors import BackendUnavailable, Phase, SandboxdError, SandboxLost
from sandboxd.ledger import Ledger
from sandboxd.lifetime import faults_become
from sandboxd.sandbox import Sandbox
from sandboxd.types import SandboxState

# Who does not answer in this time, twice, does not answer: a guest that runs takes less than a millisecond.
# Once could be this daemon's own fault, which was held up and sees the end of the time before the answer.
ANSWER_SECONDS = 2.5
QUESTIONS = 2
# Pause after a question, as a multiple of what it took, and at most so long.
PAUSE_SHARE, PAUSE_LIMIT_SECONDS = 9.0, 1.0
# For waiting callers so many are asked at once.
ASKED_AT_ONCE = 32


class Owner(Protocol):
    """The fleet, as far as checkups know it."""

    ledger: Ledger
    availability: Availability

    def pump(self) -> None: ...


class Checkups:
    """Of one pool. `failed` hears of a ready sandbox that does not answer."""

    def __init__(
        self,
        care: Care,
        clock: Clock,
        owner: Owner,
        *,
        failed: Callable[[Sandbox, SandboxdError], None],
    ) -> None:
        self.care = care
        self._clock = clock
        self._owner = owner
        self._failed = failed
        # In the order of their answers, the oldest first.
        self._fresh: OrderedDict[str, Sandbox] = OrderedDict()
        self._doubted: OrderedDict[str, Sandbox] = OrderedDict()
        self._asked: set[str] = set()
        self._tasks: set[asyncio.Task[bool]] = set()
        self._changed = asyncio.Event()

    def answered(self, sandbox: Sandbox) -> None:
        """It is ready, and has just answered."""
        sandbox.answered = self._clock.now()
        self._fresh[sandbox.id] = sandbox
        self._fresh.move_to_end(sandbox.id)
        self._changed.set()

    def forget(self, sandbox: Sandbox) -> None:
        """It is not ready any more."""
        self._fresh.pop(sandbox.id, None)
        self._doubted.pop(sandbox.id, None)

    def doubt_overdue(self) -> None:
        """Call before a plan: what has not answered of late is not granted by it."""
        while self._fresh and self.care.check_seconds:
            sandbox = next(iter(self._fresh.values()))
            if _since(sandbox) + self.care.check_seconds > self._clock.now():
                return
            del self._fresh[sandbox.id]
            self._doubted[sandbox.id] = sandbox
            self._owner.ledger.doubt(sandbox.id)
            self._changed.set()

    def ask_for_waiters(self, tasks: asyncio.TaskGroup) -> None:
        """Call after a plan: as many more of the doubted are asked as callers wait for, lest they wait for
        one that does not answer.
        """
        wanted = min(self._owner.ledger.waiting.sandboxes, ASKED_AT_ONCE - len(self._asked))
        if wanted <= 0 or not self._doubted:
            return
        for sandbox in [each for name, each in self._doubted.items() if name not in self._asked][:wanted]:
            self._asked.add(sandbox.id)
            task = tasks.create_task(self._ask(sandbox), name=f"ask {sandbox.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """No answer is waited for any more."""
        for task in self._tasks:
            task.cancel()

    async def run(self) -> None:
        """Asks in the background, for ever."""
        while True:
            self._changed.clear()
            sandbox, due = self._next()
            if sandbox is None:
                await self._changed.wait()
            elif due > (now := self._clock.now()):
                await self._clock.sleep(due - now)
            else:
                self._asked.add(sandbox.id)
                there = await self._ask(sandbox)
                spent = self._clock.now() - now
                pause = min(PAUSE_SHARE * spent, PAUSE_LIMIT_SECONDS) if there else PAUSE_LIMIT_SECONDS
                await self._clock.sleep(pause)

    def _next(self) -> tuple[Sandbox | None, float]:
        """Whom to ask next, and when."""
        for name, sandbox in self._doubted.items():
            if name not in self._asked:
                return sandbox, 0.0
        for sandbox in self._fresh.values() if self.care.check_seconds else ():
            return sandbox, _since(sandbox) + self.care.check_seconds / 2
        return None, 0.0

    async def _ask(self, sandbox: Sandbox) -> bool:
        """False where its backend is not there to be asked, which says nothing about the sandbox."""
        try:
            await self._ping(sandbox)
        except BackendUnavailable:
            if sandbox.id in self._doubted:
                self._doubted.move_to_end(sandbox.id)
            return False
        except TimeoutError:
            if self._owner.availability.error is not None:
                return False
            why = f"sandbox {sandbox.id} gave no answer within {QUESTIONS * ANSWER_SECONDS:g} s"
            self._tell(sandbox, SandboxLost(why, phase=Phase.READY))
        except SandboxdError as error:
            self._tell(sandbox, error)
        else:
            self._hear(sandbox)
        finally:
            self._asked.discard(sandbox.id)
        return True

    async def _ping(self, sandbox: Sandbox) -> None:
        """Raises SandboxLost, BackendUnavailable, TimeoutError. A question that fails is no answer."""
        for question in range(QUESTIONS):
            try:
                async with self._clock.timeout(ANSWER_SECONDS):
                    if sandbox.connection is not None:
                        with faults_become(_silent, f"asking {sandbox.id}"):
                            await sandbox.connection.ping()
                    return
            except TimeoutError:
                if question == QUESTIONS - 1:
                    raise

    def _tell(self, sandbox: Sandbox, error: SandboxdError) -> None:
        # One that was granted meanwhile is its holder's, who hears of its end by using it.
        if sandbox.state is SandboxState.WARM:
            self._failed(sandbox, error)

    def _hear(self, sandbox: Sandbox) -> None:
        if sandbox.state is not SandboxState.WARM:
            return
        doubted = self._doubted.pop(sandbox.id, None) is not None
        self.answered(sandbox)
        if doubted:
            self._owner.ledger.trust(sandbox.id)
            self._owner.pump()


def _silent(why: str) -> SandboxLost:
    return SandboxLost(f"the question failed: {why}", phase=Phase.READY)


def _since(sandbox: Sandbox) -> float:
    return sandbox.created if sandbox.answered is None else sandbox.answered
