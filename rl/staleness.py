"""What a queue policy decides: which groups may start, which are trained next and which are given up.

Staleness of a group at a step = version of the weights that the step trains, minus the oldest version
that sampled any of its tokens. Time in the queue counts: the version is read when the group is trained.

`rl.policies` holds the implementations. All of them are pure decisions without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group known by its ticket (rising with admission) and the oldest version that it can contain.

    `scored` is how many of its attempts have a verdict by now.
    """

    ticket: int
    oldest_version: int
    scored: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """All groups between admission and live weights: being played, finished, and being trained on.

    `held` counts the last: their slots are taken until the weights that they trained are live. It is 0
    while the trainer waits for a batch.
    """

    running: Sequence[Candidate] = ()
    ready: Sequence[Candidate] = ()
    held: int = 0

    @property
    def early(self) -> int:
        """Groups that are still to be trained."""
        return len(self.running) + len(self.ready)


class QueuePolicy(Protocol):
    """All methods are pure. `version` is that of the weights the next step trains."""

    def admit(self, standing: Standing) -> bool:
        """Whether one more group may start."""
        ...

    def select(self, standing: Standing, version: int) -> tuple[int, ...] | None:
        """Tickets of the next batch, all of finished groups; None to wait for more to finish."""
        ...

    def evict(self, standing: Standing, version: int) -> tuple[int, ...]:
        """Tickets of groups to be ended: a finished one is dropped, a running one goes on with what it has
        (and is dropped if that is too little or too old)."""
        ...


@dataclass(frozen=True, slots=True)
class Slots:
    """The pace that every policy keeps: with bound S and batches of P groups, at most (S + 1) · P groups are
    between admission and live weights, and `spare` more of those that are still to be trained.

    While a step trains and there is no room beside its batch, what starts would be too old after it: then
    there are no spare ones either.
    """

    bound: int
    groups_per_batch: int
    spare: int = 0

    def __post_init__(self) -> None:
        if self.bound < 0 or self.groups_per_batch < 1 or self.spare < 0:
            raise ValueError(f"{self}: the bound and spare are at least 0, groups_per_batch at least 1")

    def free(self, standing: Standing) -> bool:
        """Whether one more group may start."""
        room = (self.bound + 1) * self.groups_per_batch - standing.held
        return room > 0 and standing.early < room + self.spare

    def too_old(self, standing: Standing, version: int) -> tuple[int, ...]:
        """Tickets of groups that may not be trained on weights `version`, the running ones last."""
        groups = (*standing.ready, *standing.running)
        return tuple(group.ticket for group in groups if version - group.oldest_version > self.bound)
