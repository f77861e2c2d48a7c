"""Measures the policy on held-out tasks, through the same rollouts and sandboxes as training."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.ledger import Fate
from rl.player import Played, Player
from rl.types import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Solve rates in [0, 1] over scored attempts. Attempts that infrastructure lost are counted apart.

    `overall` is the mean over the tasks of the fixed mix, `families` the same by family; `kinds` are the
    benchmark kinds, and `benchmark` their mean in equal shares. None where nothing was scored.
    """

    overall: float | None
    families: dict[str, float]
    benchmark: float | None
    kinds: dict[str, float]
    attempts: int
    unscored: int
    seconds: float

    def describe(self) -> str:
        """One line for a person."""
        kinds = ", ".join(f"{name} {rate:.0%}" for name, rate in self.kinds.items())
        kinds = f" ({kinds})" if kinds else ""
        parts = [f"{label} {rate:.0%}" for label, rate in self._headline() if rate is not None]
        lost = f"; {self.unscored} of {self.attempts} lost to infrastructure" if self.unscored else ""
        return f"{', '.join(parts) or 'nothing scored'}{kinds} in {self.seconds:.0f} s{lost}"

    def _headline(self) -> tuple[tuple[str, float | None], ...]:
        return (("all levels", self.overall), ("benchmark", self.benchmark))

    def as_dict(self) -> dict[str, Any]:
        return {
            "overall": self.overall,
            "families": self.families,
            "benchmark": {"overall": self.benchmark, "kinds": self.kinds},
            "attempts": self.attempts,
            "unscored": self.unscored,
            "seconds": self.seconds,
        }


async def evaluate(
    player: Player,
    benchmark: Mapping[str, Sequence[Task]],
    mix: Sequence[Task],
    clock: Callable[[], float] = time.monotonic,
) -> Evaluation:
    """One attempt at each held-out task, at temperature 1; a task in both sets is tried once."""
    began = clock()
    tasks = {task.key: task for task in (*mix, *(task for kind in benchmark.values() for task in kind))}
    async with asyncio.TaskGroup() as attempts:
        jobs = {key: attempts.create_task(player.play(task)) for key, task in tasks.items()}
    rewards: dict[str, float] = {}
    for key, job in jobs.items():
        played: Played = job.result()
        player.ledger.settle(played.account, Fate.EVALUATED)
        if played.episode.reward is not None:
            rewards[key] = played.episode.reward
    by_family: dict[str, list[Task]] = defaultdict(list)
    for task in mix:
        by_family[task.family].append(task)
    kinds = _rates(benchmark, rewards)
    return Evaluation(
        overall=_mean(rewards, mix),
        families=_rates(by_family, rewards),
        benchmark=sum(kinds.values()) / len(kinds) if kinds else None,
        kinds=kinds,
        attempts=len(tasks),
        unscored=len(tasks) - len(rewards),
        seconds=clock() - began,
    )


def _rates(parts: Mapping[str, Sequence[Task]], rewards: Mapping[str, float]) -> dict[str, float]:
    rates = {name: _mean(rewards, tasks) for name, tasks in parts.items()}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _mean(rewards: Mapping[str, float], tasks: Iterable[Task]) -> float | None:
    known = [rewards[task.key] for task in tasks if task.key in rewards]
    return sum(known) / len(known) if known else None
