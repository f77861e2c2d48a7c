"""Which groups may start, which are trained next and which are too old: pure decisions, no waiting.

Staleness of a group at a step = version of the weights that the step trains, minus the oldest version
that sampled any of its tokens. Time in the queue counts: the version is read when the group is trained.

Why nothing need be dropped: with bound S and batches of P groups, at most (S+1)·P groups are between
admission and live weights, and a batch is formed only if those it leaves behind, running ones included,
can still all be trained in time: at most j·P of them may be due within the next j steps. When nothing
runs, the P oldest satisfy this; so waiting always ends. `evict` is the net under this argument.
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
        if len(ready) < self.groups_per_batch:
            return None
        oldest_first = sorted(ready, key=lambda c: (c.oldest_version, c.ticket))
        chosen, left = oldest_first[: self.groups_per_batch], oldest_first[self.groups_per_batch :]
        if not self._all_in_time([*left, *running], version + 1):
            return None
        return tuple(c.ticket for c in chosen)

    def _all_in_time(self, groups: Sequence[Candidate], version: int) -> bool:
        """Whether every group can be trained within the bound when the next step trains `version`."""
        # The last version at which a group may be trained is its oldest plus the bound.
        due = sorted(max(c.oldest_version + self.bound - version + 1, 0) for c in groups)
        return all(place < steps * self.groups_per_batch for place, steps in enumerate(due))
