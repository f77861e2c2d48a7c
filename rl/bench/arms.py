"""What is compared with what: the arms (how the queue is kept), and the worlds that they are put into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl.policies import QueueRules
from sandboxd.simulation import Simulated

GROUPS, SAMPLES = 8, 8
"""Of a batch: groups, and attempts of each."""
MEAN_TOKENS = 200
"""Of an episode, both turns. Time is simulated, so only the ratio to the rates below counts."""
FULL_BATCH_SECONDS = 10.0
"""What the generator takes for the tokens of a batch while it is full."""
STREAMS = 8
"""So many requests fill the generator, which plays a batch in 8 turns: as with 512 rollouts of a 7B model on
one H100 (5.8K tokens/s in all, some 90 for one). On two cores vLLM is filled by 20 of 64: `--streams`."""
UPDATE_SECONDS = 0.15
SPARE_SAMPLES, SPARE_GROUPS = 2, 2
LATE_MIN_SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to keep the queue."""

    name: str
    bound: int
    rules: QueueRules = field(default_factory=QueueRules)
    spare_samples: int = 0


ARMS = (
    Arm("sync", 0),
    Arm("one-step-off", 1, QueueRules("in_order")),
    Arm("async-1", 1),
    Arm("async-2", 2),
    Arm("async-4", 4),
    Arm("async-8", 8),
    Arm("drop-late", 1, QueueRules("drop_late", min_samples=LATE_MIN_SAMPLES)),
    Arm("redundancy", 1, QueueRules(), SPARE_SAMPLES),
    Arm("oversampling", 1, QueueRules(spare_groups=SPARE_GROUPS)),
)
TAILS: Mapping[str, float] = {"constant": 0.0, "lognormal 0.5": 0.5, "lognormal 1.0": 1.0}
"""Deviation of the logarithm of an episode's length, by name."""
LONGEST = "lognormal 1.0"
SEEDS = 3
DECISIVE = ("sync", "async-1")
DECISIVE_TIMES = 4
"""The ratio of these arms at equal rates is required, and three runs of 24 steps of each give it within
0.06: they get so many times the seeds."""
RATES = (0.25, 0.5, 1.0, 1.2, 2.0, 4.0)
"""Generator's rate over trainer's: groups a second of a full generator, over those that the trainer takes."""
POOL = Simulated(warm=8, size=256, starts=128, command_seconds=0.1)
"""More starts at once than are ever wanted: a start's length is what is to be seen, not a host's limit."""
SANDBOXES: Mapping[str, Simulated] = {
    "warm": replace(POOL, warm=64),
    "0.2 s": replace(POOL, start_seconds=0.2),
    "5 s": replace(POOL, start_seconds=5.0),
    "5 s, 2% failing": replace(POOL, start_seconds=5.0, faults=("fail start 0.02", "die 0.02")),
}


@dataclass(frozen=True, slots=True)
class World:
    """A generator and a trainer of these relative rates, a tail, and sandboxes; names as above."""

    rate: float = 1.0
    tail: str = "lognormal 1.0"
    sandboxes: str = "warm"

    @property
    def judged(self) -> bool:
        """Whether a required result is read from it: its noise must be small."""
        return self.tail == LONGEST and self.rate == 1.0

    @property
    def train_seconds(self) -> float:
        """What the trainer takes for a batch of mean length."""
        return FULL_BATCH_SECONDS * self.rate


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the bench: so many steps of an arm in a world, all chance from `seed`.

    `streams` requests fill the generator, and as many episodes are played at once: more would be served in
    the same time together, but the late ones among them later.
    """

    arm: Arm
    world: World
    steps: int = 24
    seed: int = 0
    streams: int = STREAMS


def cells(chosen: Sequence[World], arms: Sequence[Arm], sample: Cell, seeds: int = SEEDS) -> list[Cell]:
    """Every arm in every world, with the steps and from the seed of `sample`; where a requirement is judged,
    with so many seeds, and more where one hangs on the ratio of two arms."""
    return [
        replace(sample, arm=arm, world=world, seed=sample.seed + number)
        for world in chosen
        for arm in arms
        for number in range(_runs(arm, world, seeds))
    ]


def _runs(arm: Arm, world: World, seeds: int) -> int:
    if not world.judged:
        return 1
    decisive = arm.name in DECISIVE and world.sandboxes == "warm"
    return seeds * DECISIVE_TIMES if decisive else seeds


def worlds(*, full: bool, quick: bool) -> list[World]:
    """Those of a sweep: all rates and tails with warm sandboxes, all sandboxes at equal rates with the
    longest tail. `full` is every combination, `quick` the corners that the requirements speak of."""
    if quick:
        return [World(1.0), World(1.2), World(1.0, sandboxes="5 s"), World(1.0, sandboxes="5 s, 2% failing")]
    if full:
        return [World(rate, tail, boxes) for boxes in SANDBOXES for tail in TAILS for rate in RATES]
    swept = [World(rate, tail) for tail in TAILS for rate in RATES]
    return swept + [World(1.0, LONGEST, boxes) for boxes in SANDBOXES if boxes != "warm"]
