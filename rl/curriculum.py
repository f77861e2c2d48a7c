"""Which task comes next: equal shares, or by how much each family and level can still teach.

Consumes the solve rate of each finished group; produces tasks. It never waits. The state is plain
JSON and equal bit for bit after a round trip, so a resumed run draws the tasks the stopped one would have.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl.errors import Exhausted
from rl.estimates import Estimate, Place, ProblemEstimates
from rl.tasks import TaskSource
from rl.tasks.source import SEEDS_OF_A_RUN
from rl.types import Task


class Curriculum(Protocol):
    """Chooses tasks. Each call of `next_task` gives a task that was never given before."""

    def next_task(self) -> Task:
        """Raises Exhausted when there is nothing left to learn."""
        ...

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """Take the rewards of a finished group's scored episodes, whatever becomes of the group."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def digest(curriculum: Curriculum) -> str:
    """Of its whole state, in 16 hexadecimal digits."""
    state = json.dumps(curriculum.state_dict(), sort_keys=True)
    return hashlib.blake2b(state.encode(), digest_size=8).hexdigest()


class _Drawer:
    """The random state and the number of tasks already drawn at each place."""

    def __init__(self, source: TaskSource, seed: int) -> None:
        self.source = source
        self.rng = random.Random(f"curriculum/{seed}")
        self.seed = seed
        self.drawn: dict[Place, int] = {}

    def draw(self, place: Place) -> Task:
        number = self.drawn.get(place, 0)
        self.drawn[place] = number + 1
        return self.source.train(*place, self.seed * SEEDS_OF_A_RUN + number)

    def choose(self, places: Sequence[Place], weights: Sequence[float]) -> Place:
        return self.rng.choices(places, weights)[0]

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self.rng.getstate()
        return {
            "rng": [version, list(numbers), gauss],
            "seed": self.seed,
            "drawn": [[family, level, count] for (family, level), count in sorted(self.drawn.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))
        self.seed = state["seed"]
        self.drawn = {(family, level): count for family, level, count in state["drawn"]}


class Uniform:
    """The plain baseline: every place equally often, whatever the solve rates."""

    def __init__(self, source: TaskSource, places: Sequence[Place], *, seed: int) -> None:
        if not places:
            raise ValueError("the curriculum has no family and level to draw from")
        self._places = list(places)
        self._drawer = _Drawer(source, seed)

    def next_task(self) -> Task:
        return self._drawer.draw(self._drawer.choose(self._places, [1.0] * len(self._places)))

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """Take nothing from it."""

    def metrics(self) -> dict[str, float]:
        return {"curriculum/places": float(len(self._places))}

    def state_dict(self) -> dict[str, Any]:
        return {"drawer": self._drawer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawer.load_state_dict(state["drawer"])


@dataclass(frozen=True, slots=True)
class BandSettings:
    """How `SolveRateBands` judges places.

    A place is in the band while its estimated solve rate lies in `[low, high]`; outside, it keeps the
    share `outside` of a place in the middle. The next level of a family opens once the hardest open
    one reaches `open_at`. `memory` is the number of episodes that an estimate looks back on, `rest` for how
    many epochs a problem of a fixed set is left out: see `ProblemEstimates`.
    """

    low: float = 0.05
    high: float = 0.85
    outside: float = 0.02
    open_at: float = 0.25
    memory: float = 16.0
    rest: int = 4

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < self.high <= 1.0:
            raise ValueError(f"the band [{self.low}, {self.high}] must lie in [0, 1] and not be empty")
        if self.outside <= 0.0 or self.memory <= 0.0:
            raise ValueError("outside and memory must be positive: a place never drawn is never re-estimated")


class SolveRateBands:
    """Draws where the solve rate is in the middle band, and opens levels as earlier ones are learned.

    A place's weight at estimated solve rate p is `27/4 · p·(1 - p)·(1 - p)`, at most 1: the variance of
    one episode's reward, for advantages are differences within a group, times the share that is still
    to be learned. Outside the band the weight is `outside`. A place not yet seen counts as p = 1/2.

    A family is drawn as often as its best place deserves times the share of all its levels that is left to
    learn, so that one whose last level alone is unsolved leaves room for one that has hardly begun. Within
    it a place's groups that are still being played share its weight, so that a new level is not tried
    often before it is known.

    When every level is open and was last seen above the band, of a fixed set each of its problems, no group
    would carry a signal: the tasks have then run out.
    """

    def __init__(
        self,
        source: TaskSource,
        families: Sequence[str],
        *,
        seed: int,
        settings: BandSettings = BandSettings(),
    ) -> None:
        counts = source.levels()
        if not families:
            raise ValueError("the curriculum has no family to draw from")
        self._levels = {family: counts[family] for family in families}
        self._open = dict.fromkeys(families, 1)
        self._settings = settings
        self._estimates: dict[Place, Estimate] = {}
        self._playing: Counter[Place] = Counter()
        self._drawer = _Drawer(source, seed)
        self._problems = ProblemEstimates(settings.low, settings.high, settings.memory, settings.rest)

    def next_task(self) -> Task:
        if self._mastered():
            raise Exhausted(f"every level of {', '.join(self._levels)} is solved")
        chosen = self._drawer.choose(*self._shares())
        self._playing[chosen] += 1
        # Where all problems of a set rest, whichever comes next is played.
        for _ in range(self._drawer.source.set_size(*chosen)):
            task = self._drawer.draw(chosen)
            if not self._problems.rests(task):
                return task
        return self._drawer.draw(chosen)

    def _mastered(self) -> bool:
        places = [(family, level) for family, count in self._levels.items() for level in range(count)]
        return all(map(self._is_mastered, places))

    def _is_mastered(self, place: Place) -> bool:
        if size := self._drawer.source.set_size(*place):
            return self._problems.solved(place) >= size
        known = self._estimate(place)
        return known.seen >= self._settings.memory and known.rate > self._settings.high

    def _shares(self) -> tuple[list[Place], list[float]]:
        """The open places, and how often each is to be drawn now."""
        shares: dict[Place, float] = {}
        for family, count in self._open.items():
            weights = {(family, level): self.weight((family, level)) for level in range(count)}
            within = {place: weight / (1 + self._playing[place]) for place, weight in weights.items()}
            scale = max(weights.values()) * self._left_to_learn(family) / sum(within.values())
            shares |= {place: share * scale for place, share in within.items()}
        return list(shares), list(shares.values())

    def _left_to_learn(self, family: str) -> float:
        """The mean share of attempts that fail, over all levels; a level never played counts as unsolved."""
        places = [(family, level) for level in range(self._levels[family])]
        return 1.0 - sum(self._rate(place) for place in places if place in self._estimates) / len(places)

    def open_places(self) -> list[Place]:
        """The places that can be drawn now."""
        return [(family, level) for family, count in self._open.items() for level in range(count)]

    def weight(self, place: Place) -> float:
        """How often a place is drawn, relative to one whose solve rate is 1/3, which is drawn most."""
        rate = self._rate(place)
        inside = self._settings.low <= rate <= self._settings.high
        worth = 27.0 / 4.0 * rate * (1.0 - rate) ** 2 if inside else 0.0
        return max(worth, self._settings.outside)

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        place = (task.family, task.level)
        if self._playing[place]:
            self._playing[place] -= 1
        if task.family not in self._open or not rewards:
            return
        estimate = self._estimates.setdefault(place, Estimate())
        if self._drawer.source.set_size(*place):
            self._problems.observe(task, rewards, self._rate(place))
        estimate.add(rewards, self._settings.memory)
        hardest = (task.family, self._open[task.family] - 1)
        if self._estimate(hardest).seen and self._rate(hardest) >= self._settings.open_at:
            self._open[task.family] = min(self._open[task.family] + 1, self._levels[task.family])

    def metrics(self) -> dict[str, float]:
        found = {f"curriculum/open/{family}": float(count) for family, count in self._open.items()}
        for family, level in sorted(self._estimates):
            found[f"curriculum/solve_rate/{family}/{level}"] = self._rate((family, level))
        return found | self._problems.metrics()

    def state_dict(self) -> dict[str, Any]:
        return {
            "drawer": self._drawer.state_dict(),
            "open": dict(self._open),
            "playing": [
                [family, level, count] for (family, level), count in sorted(self._playing.items()) if count
            ],
            "estimates": [
                [family, level, estimate.solved, estimate.failed]
                for (family, level), estimate in sorted(self._estimates.items())
            ],
            "problems": self._problems.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawer.load_state_dict(state["drawer"])
        # In the order of the families, not of the file: the order decides which place a random number hits.
        self._open = {family: int(state["open"].get(family, 1)) for family in self._levels}
        self._playing = Counter({(family, level): count for family, level, count in state["playing"]})
        self._estimates = {
            (family, level): Estimate(solved, failed) for family, level, solved, failed in state["estimates"]
        }
        # A checkpoint of a version that did not tell problems apart has none.
        if (problems := state.get("problems")) is not None:
            self._problems.load_state_dict(problems)

    def _rate(self, place: Place) -> float:
        """A fixed set's is that of all its problems: the last few episodes are of two of them."""
        of_all = self._problems.rate(place)
        return self._estimate(place).rate if of_all is None else of_all

    def _estimate(self, place: Place) -> Estimate:
        return self._estimates.get(place) or Estimate()
