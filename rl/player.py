"""Plays episodes, a bounded number at once, each with a ledger account and a time limit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from rl.errors import LedgerError
from rl.ledger import Account, Ledger
from rl.permits import Permits
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


class Player:
    """`concurrent` bounds the episodes that run at once, in the order in which they were asked for."""

    def __init__(self, rollout: Playable, ledger: Ledger, *, concurrent: int, episode_seconds: float) -> None:
        self.ledger = ledger
        self._rollout = rollout
        self._permits = Permits(concurrent)
        self._episode_seconds = episode_seconds
        self.running = 0

    @property
    def limit(self) -> int:
        """Episodes that may run at once. A lower one ends none that runs."""
        return self._permits.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._permits.limit = limit

    @property
    def waiting(self) -> int:
        """Episodes that wait for their turn."""
        return self._permits.waiting

    def prompt(self, task: Task) -> TokenIds:
        return self._rollout.prompt(task)

    async def play(self, task: Task) -> Played:
        """One attempt; one that outlasts its time is Cancelled, so it can block nothing for longer.

        Run it as an asyncio task of its own: the account is found through the task's context.
        """
        async with self._permits:
            account = self.ledger.open()
            self.running += 1
            try:
                async with asyncio.timeout(self._episode_seconds):
                    episode = await self._rollout.run(task)
            except TimeoutError:
                return Played(account, Episode(task, (), Cancelled("timeout"), StopReason.TIMEOUT))
            finally:
                self.running -= 1
        if account.tokens != episode.sampled_count:
            raise LedgerError(
                f"the generator handed {account.tokens} tokens to an episode of {task.key} "
                f"that holds {episode.sampled_count}"
            )
        return Played(account, episode)

    async def play_group(self, task: Task, count: int) -> list[Played]:
        """`count` attempts at the same task, at once."""
        async with asyncio.TaskGroup() as members:
            jobs = [members.create_task(self.play(task)) for _ in range(count)]
        return [job.result() for job in jobs]
