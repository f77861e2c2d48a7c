"""The queue between generator and trainer once more, from its rules alone and with nothing of `rl`.

As many groups are in flight as the bound allows. They are started in order, and the oldest are trained as
soon as those left behind can still be trained in time. Nothing takes time but tokens, tools, training and
updates.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

NEVER = float("inf")


@dataclass(frozen=True)
class Rates:
    """`streams` requests are served at once, each `tokens_per_second`; an attempt takes `tool` seconds
    more, a trained token `trained`, and new weights stop everything for `update`."""

    streams: int
    tokens_per_second: float
    tool: float
    trained: float
    update: float


@dataclass(eq=False)
class Played:
    """A group: the tokens of its attempts, whether it teaches nothing and is replaced, and how far it is."""

    lengths: list[int]
    silent: bool
    begun: int | None = None
    started: int = 0
    ended: int = 0

    @property
    def ready(self) -> bool:
        return self.ended == len(self.lengths)


@dataclass
class IdealQueue:
    """Trains `size` of `groups` at a time, on weights at most `bound` versions newer than their first."""

    groups: Iterable[Played]
    bound: int
    size: int
    rates: Rates
    now: float = 0.0
    version: int = 0
    busy: int = 0
    training: list[Played] = field(default_factory=list)
    early: list[Played] = field(default_factory=list)
    ends: list[tuple[float, int, Played]] = field(default_factory=list)
    trained_at: float = NEVER

    def step_seconds(self, steps: int) -> list[float]:
        """How long each of so many steps takes, from live weights to live weights."""
        coming, numbers = iter(self.groups), itertools.count()
        lives = [0.0]
        while len(lives) <= steps:
            self._start(coming, numbers)
            if not self.training and (batch := self._batch()):
                self.training = batch
                self.early = [group for group in self.early if group not in batch]
                tokens = sum(sum(group.lengths) for group in batch)
                self.trained_at = self.now + tokens * self.rates.trained
            elif self.trained_at <= (self.ends[0][0] if self.ends else NEVER):
                self._update()
                lives.append(self.now)
            else:
                self._end_attempt()
        return [after - before for before, after in itertools.pairwise(lives)]

    def _start(self, coming: Iterable[Played], numbers: Iterable[int]) -> None:
        room = (self.bound + 1) * self.size - len(self.training) - len(self.early)
        self.early += itertools.islice(coming, room)
        waiting = (group for group in self.early for _ in range(len(group.lengths) - group.started))
        for group, number in zip(
            itertools.islice(waiting, self.rates.streams - self.busy), numbers, strict=False
        ):
            if group.begun is None:
                group.begun = self.version
            length = group.lengths[group.started]
            group.started += 1
            self.busy += 1
            seconds = length / self.rates.tokens_per_second + self.rates.tool
            heapq.heappush(self.ends, (self.now + seconds, number, group))

    def _end_attempt(self) -> None:
        self.now, _, group = heapq.heappop(self.ends)
        self.busy -= 1
        group.ended += 1
        if group.ready and group.silent:
            self.early.remove(group)

    def _update(self) -> None:
        """The step is done, and all that runs stands still until the weights are live."""
        self.now = self.trained_at + self.rates.update
        self.ends = [(end + self.rates.update, number, group) for end, number, group in self.ends]
        self.training, self.trained_at = [], NEVER
        self.version += 1

    def _batch(self) -> list[Played]:
        """The oldest finished groups; none while some left behind could not be trained in time."""
        ready = sorted((group for group in self.early if group.ready), key=lambda group: group.begun or 0)
        chosen = ready[: self.size]
        left = [group for group in self.early if group not in chosen]
        starts = (self.version if group.begun is None else group.begun for group in left)
        due = sorted(start + self.bound - self.version for start in starts)
        in_time = all(number < steps * self.size for number, steps in enumerate(due))
        return chosen if len(chosen) == self.size and in_time else []
