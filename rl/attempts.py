"""Many attempts at many tasks, and what they say: pass@k, and how every attempt ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.generator import Generation, Generator, GeneratorStats, Sampling
from rl.ledger import Fate
from rl.loop import first_error
from rl.passk import Estimate, Tally, estimate
from rl.player import Player
from rl.types import Cancelled, Episode, Task, TokenIds, Unscored

SOLVED = 1.0
"""An attempt counts as solved at full reward alone."""


class Tempered:
    """A generator that draws at another temperature and top_p than the policy's own."""

    def __init__(self, inner: Generator, temperature: float, top_p: float) -> None:
        self._inner = inner
        self._temperature = temperature
        self._top_p = top_p

    @property
    def version(self) -> int:
        return self._inner.version

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        drawn = replace(sampling, temperature=self._temperature, top_p=self._top_p)
        return await self._inner.generate(context_ids, drawn)

    async def update_weights(self, path: Path, version: int) -> None:
        await self._inner.update_weights(path, version)

    def stats(self) -> GeneratorStats:
        return self._inner.stats()


@dataclass(frozen=True, slots=True)
class Attempts:
    """All attempts at `tasks`, in the order of the tasks; `seconds` is how long they took together."""

    tasks: tuple[Task, ...]
    episodes: tuple[tuple[Episode, ...], ...]
    seconds: float

    def tallies(self, group: str | None = None) -> list[Tally]:
        """One for each task, or each task of a family's level (`family/level`)."""
        pairs = zip(self.tasks, self.episodes, strict=True)
        return [_tally(episodes) for task, episodes in pairs if group in (None, group_of(task))]

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group_of(task) for task in self.tasks))

    def pass_at(self, ks: Sequence[int], *, seed: int = 0) -> dict[str, list[Estimate]]:
        """`all`, and each family's level where there are several, → an estimate for every k that has one."""
        names = ["all", *(self.groups if len(self.groups) > 1 else ())]
        made = {
            name: [estimate(self.tallies(None if name == "all" else name), k, seed=seed) for k in ks]
            for name in names
        }
        return {name: [each for each in row if each is not None] for name, row in made.items()}

    def as_dict(self, ks: Sequence[int], *, seed: int = 0) -> dict[str, Any]:
        """What `eval.json` holds of them."""
        everything = [episode for episodes in self.episodes for episode in episodes]
        return {
            "attempts": len(everything),
            "scored": sum(episode.reward is not None for episode in everything),
            "unscored": dict(Counter(why for episode in everything if (why := _loss(episode)) is not None)),
            "stop_reasons": dict(Counter(str(episode.stop_reason) for episode in everything)),
            "seconds": self.seconds,
            "pass_at_k": {
                name: {str(each.k): each.as_dict() for each in row}
                for name, row in self.pass_at(ks, seed=seed).items()
            },
            "tasks": [
                {"key": task.key, "rewards": [episode.reward for episode in episodes]}
                for task, episodes in zip(self.tasks, self.episodes, strict=True)
            ],
        }


def group_of(task: Task) -> str:
    return f"{task.family}/{task.level}"


async def attempt_all(
    player: Player, tasks: Sequence[Task], samples: int, clock: Callable[[], float] = time.monotonic
) -> Attempts:
    """`samples` attempts at each task, as many at once as the player allows.

    Raises what ends the whole evaluation (GeneratorDead, ConfigError, PoolNotFound), not in a group.
    """
    began = clock()
    try:
        async with asyncio.TaskGroup() as attempts:
            jobs = [[attempts.create_task(player.play(task)) for _ in range(samples)] for task in tasks]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    for job in (job for row in jobs for job in row):
        player.ledger.settle(job.result().account, Fate.EVALUATED)
    episodes = tuple(tuple(job.result().episode for job in row) for row in jobs)
    return Attempts(tuple(tasks), episodes, clock() - began)


def _tally(episodes: Sequence[Episode]) -> Tally:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return Tally(len(rewards), sum(reward >= SOLVED for reward in rewards))


def _loss(episode: Episode) -> str | None:
    """Why an attempt has no verdict; None when it has one."""
    match episode.outcome:
        case Unscored(kind, stage, _):
            return f"{kind} in {stage}"
        case Cancelled(reason):
            return f"cancelled: {reason}"
        case _:
            return None
