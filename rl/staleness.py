"""Which groups may start, which are trained next and which are too old: pure decisions, no waiting.

Staleness of a group at a step = version of the weights that the step trains, minus the oldest version
that sampled any of its tokens. Time in the queue counts: the version is read when the group is trained.

Why nothing need be dropped: with bound S and batches of P groups, at most (S+1)·P groups are between
admission and live weights. Each step trains the P oldest, so of the groups admitted under version v at
most P remain S steps later, and that step waits for them. `evict` is the net under this argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group known by its ticket (rising with admission) and the oldest version that it can contain."""

    ticket: int
    oldest_version: int


class StalenessPolicy(Protocol):
    """All methods are pure. `version` is that of the weights the next step trains."""

    def admit(self, outstanding: int) -> bool:
        """Whether one more group may start when `outstanding` are between admission and live weights."""
        ...

    def evict(self, ready: Sequence[Candidate], version: int) -> tuple[int, ...]:
        """Tickets of finished groups that must not be trained any more."""
        ...

    def select(
        self, ready: Sequence[Candidate], running: Sequence[Candidate], version: int
    ) -> tuple[int, ...] | None:
        """Tickets of the next batch; None to wait for more groups to finish."""
        ...


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """Paces admission by slots and trains the oldest first. Bound 0 is synchronous training."""

    bound: int
    groups_per_batch: int

    @property
    def slots(self) -> int:
        return (self.bound + 1) * self.groups_per_batch

    def admit(self, outstanding: int) -> bool:
        return outstanding < self.slots

    def evict(self, ready: Sequence[Candidate], version: int) -> tuple[int, ...]:
        return tuple(c.ticket for c in ready if version - c.oldest_version > self.bound)

    def select(
        self, ready: Sequence[Candidate], running: Sequence[Candidate], version: int
    ) -> tuple[int, ...] | None:
        # A running group that would be too old at the step after this one belongs into this one.
        due = any(version - c.oldest_version >= self.bound for c in running)
        if len(ready) < self.groups_per_batch or due:
            return None
        oldest_first = sorted(ready, key=lambda c: (c.oldest_version, c.ticket))
        return tuple(c.ticket for c in oldest_first[: self.groups_per_batch])
