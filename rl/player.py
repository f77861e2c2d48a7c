"""Plays episodes, a bounded number at once, each with a ledger account and a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from rl.errors import LedgerError
from rl.ledger import Account, Ledger
from rl.types import Cancelled, Episode, StopReason, Task, TokenIds


class Playable(Protocol):
    """What `rl.rollout.Rollout` offers."""

    def prompt(self, task: Task) -> TokenIds: ...

    async def run(self, task: Task) -> Episode:
        """Plays one episode; raises only for what ends the whole run."""
        ...


@dataclass(frozen=True, slots=True)
class Played:
    """An episode and the account that is still to be settled."""

    account: Account
    episode: Episode


class Cut:
    """Ends one attempt early, wherever it is; nothing once the attempt has ended. For one attempt only.

    `on_begin` is called when its turn has come and it begins.
    """

    def __init__(self) -> None:
        self.on_begin: Callable[[], None] | None = None
        self.reason = ""
        """Why it was ended; empty while it was not."""
        self._scope: asyncio.Timeout | None = None
        self._over = False

    def now(self, reason: str) -> None:
        """Ends it. The first reason holds."""
        if self.reason or self._over:
            return
        self.reason = reason
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """The attempt. Raises TimeoutError out of it when it is cut."""
        try:
            async with asyncio.timeout(None) as self._scope:
                if self.reason:
                    raise TimeoutError
                yield
        finally:
            self._scope, self._over = None, True


class Player:
    """`concurrent` bounds the episodes that run at once, in the order in which they were asked for."""

    def __init__(self, rollout: Playable, ledger: Ledger, *, concurrent: int, episode_seconds: float) -> None:
        self.ledger = ledger
        self._rollout = rollout
        self._permits = asyncio.Semaphore(concurrent)
        self._episode_seconds = episode_seconds
        self.running = 0

    def prompt(self, task: Task) -> TokenIds:
        return self._rollout.prompt(task)

    async def play(self, task: Task, cut: Cut | None = None) -> Played:
        """One attempt; one that outlasts its time is Cancelled, so it can block nothing for longer.

        Run it as an asyncio task of its own: the account is found through the task's context. One that is
        `cut` before its turn has an account, too, without a token.
        """
        cut = cut or Cut()
        account: Account | None = None
        try:
            async with cut.scope(), self._permits:
                account = self.ledger.open()
                self.running += 1
                if cut.on_begin is not None:
                    cut.on_begin()
                try:
                    async with asyncio.timeout(self._episode_seconds):
                        episode = await self._rollout.run(task)
                finally:
                    self.running -= 1
        except TimeoutError:
            stopped = StopReason.GIVEN_UP if cut.reason else StopReason.TIMEOUT
            given_up = Episode(task, (), Cancelled(cut.reason or "timeout"), stopped)
            return Played(account or self.ledger.open(), given_up)
        if account.tokens != episode.sampled_count:
            raise LedgerError(
                f"the generator handed {account.tokens} tokens to an episode of {task.key} "
                f"that holds {episode.sampled_count}"
            )
        return Played(account, episode)
