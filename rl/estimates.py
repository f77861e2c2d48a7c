"""Solve rates as they are estimated: of a family's level, and of each problem of a fixed set."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.types import Task

Place = tuple[str, int]
"""A family and a level."""


@dataclass(slots=True)
class Estimate:
    """Discounted counts of solved and failed episodes."""

    solved: float = 0.0
    failed: float = 0.0

    @property
    def seen(self) -> float:
        return self.solved + self.failed

    @property
    def rate(self) -> float:
        """Mean of the Beta posterior from a prior of one solved and one failed episode."""
        return (self.solved + 1.0) / (self.seen + 2.0)

    def rate_after(self, prior: float) -> float:
        """The same from a prior with this mean that weighs as much as one episode."""
        return (self.solved + prior) / (self.seen + 1.0)

    def add(self, rewards: Sequence[float], memory: float) -> None:
        """Takes these in, looking back on `memory` episodes."""
        keep = max(0.0, min(1.0, (memory - len(rewards)) / self.seen)) if self.seen else 0.0
        self.solved = self.solved * keep + sum(rewards)
        self.failed = self.failed * keep + len(rewards) - sum(rewards)


class ProblemEstimates:
    """The problems of fixed sets, one by one: those known to be outside of the band rest for some epochs.

    A problem's prior is the estimate of its level. It rests once `memory` of its episodes were seen and its
    solve rate is below `low` or above `high`: it is then left out of the next `rest` epochs of its set, and
    comes again in the one after, as one of which no more is known than half of that. So a problem that has
    come within reach, or was forgotten, is found out, and none is lost for ever. With `rest` 0 none rests.
    """

    def __init__(self, low: float, high: float, memory: float, rest: int) -> None:
        self._low, self._high, self._memory, self._rest = low, high, memory, rest
        self._known: defaultdict[Place, dict[str, Estimate]] = defaultdict(dict)
        self._left_out: defaultdict[Place, dict[str, int]] = defaultdict(dict)
        """Epochs that each of those that rest has still to miss."""
        self._rested = self._revived = 0

    def rate(self, place: Place) -> float | None:
        """The mean of all problems of a level that were seen; None where none was."""
        known = self._known.get(place)
        return sum(each.rate for each in known.values()) / len(known) if known else None

    def solved(self, place: Place) -> int:
        """How many problems of a level are known to be above the band."""
        known = self._known.get(place, {}).values()
        return sum(each.seen >= self._memory and each.rate > self._high for each in known)

    def rests(self, task: Task) -> bool:
        """Whether it is left out now that its turn in an epoch has come; each call is one turn."""
        place, name = (task.family, task.level), _name(task)
        left_out = self._left_out[place]
        if name not in left_out:
            return False
        if left_out[name] > 0:
            left_out[name] -= 1
            return True
        del left_out[name]
        self._revived += 1
        known = self._known[place][name]
        known.solved, known.failed = known.solved / 2, known.failed / 2
        return False

    def observe(self, task: Task, rewards: Sequence[float], prior: float) -> None:
        """`prior` is the estimate of its level before."""
        place, name = (task.family, task.level), _name(task)
        known = self._known[place].setdefault(name, Estimate())
        known.add(rewards, self._memory)
        rate = known.rate_after(prior)
        if self._rest and known.seen >= self._memory and not self._low <= rate <= self._high:
            self._rested += name not in self._left_out[place]
            self._left_out[place][name] = self._rest

    def metrics(self) -> dict[str, float]:
        """How many problems of each level rest, and how often one began to and came back."""
        if not self._known:
            return {}
        resting = {
            f"curriculum/resting/{family}/{level}": float(len(self._left_out[family, level]))
            for family, level in sorted(self._known)
        }
        return resting | {
            "curriculum/rested": float(self._rested),
            "curriculum/revived": float(self._revived),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": [self._rested, self._revived],
            "problems": [
                [*place, name, each.solved, each.failed, self._left_out[place].get(name, -1)]
                for place, known in sorted(self._known.items())
                for name, each in sorted(known.items())
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rested, self._revived = state["counts"]
        self._known.clear()
        self._left_out.clear()
        for family, level, name, solved, failed, left in state["problems"]:
            self._known[family, level][name] = Estimate(solved, failed)
            if left >= 0:
                self._left_out[family, level][name] = left


def _name(task: Task) -> str:
    """What tells a problem from the others of its level, also where these have changed since."""
    return hashlib.blake2b(task.question.encode(), digest_size=8).hexdigest()
