"""One group under way: its attempts, the spare ones among them, and how it ends before all of them have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rl.player import Cut, Played, Player
from rl.types import Group, Task


@dataclass(frozen=True, slots=True)
class GroupRules:
    """`samples` scored attempts are wanted, `spare` more are started, and fewer than `min_samples` verdicts
    make no group."""

    samples: int
    spare: int = 0
    min_samples: int = 2


class GroupPlay:
    """Plays `samples + spare` attempts at once and ends with the first `samples` that have a verdict.

    Attempts that have a verdict by then all take part. Every attempt that began is among what `run` returns,
    so the ledger can close: those that were needed no more are Cancelled with the reason `spare` or `late`.
    """

    def __init__(self, player: Player, task: Task, rules: GroupRules) -> None:
        self.task = task
        self.ended = False
        """Whether `end` has been called: who has no verdict by then is late."""
        self._player = player
        self._rules = rules
        self._cuts = [Cut() for _ in range(rules.samples + rules.spare)]
        self._scored = 0

    def end(self) -> None:
        """Ends the attempts that still run; `run` then returns soon."""
        self.ended = True
        self._cut("late")

    async def run(self, on_begin: Callable[[], None], on_scored: Callable[[int], None]) -> list[Played]:
        """All attempts. `on_begin` is called when each begins, for which it may have to wait until others
        have ended; `on_scored` hears how many have a verdict, whenever one more has."""
        for cut in self._cuts:
            cut.on_begin = on_begin
        async with asyncio.TaskGroup() as members:
            jobs = [members.create_task(self._play(cut, on_scored)) for cut in self._cuts]
        if any(job.cancelled() for job in jobs):
            # No error to a TaskGroup: the group would be gone without a word, and its slot with it.
            raise RuntimeError(f"an attempt at {self.task.key} was cancelled, and by nobody who may")
        return [job.result() for job in jobs]

    def group(self, members: list[Played]) -> Group:
        """The group that these attempts make; its prompt is computed once."""
        episodes = tuple(member.episode for member in members)
        return Group(self.task, self._player.prompt(self.task), episodes)

    def too_few(self, group: Group) -> bool:
        """Whether it has fewer verdicts than a group needs."""
        return len(group.scored) < self._rules.min_samples

    async def _play(self, cut: Cut, on_scored: Callable[[int], None]) -> Played:
        played = await self._player.play(self.task, cut)
        if played.episode.reward is not None:
            self._scored += 1
            on_scored(self._scored)
            if self._scored == self._rules.samples:
                self._cut("spare")
        return played

    def _cut(self, reason: str) -> None:
        for cut in self._cuts:
            cut.now(reason)
