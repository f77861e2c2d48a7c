"""Paces admission so that nothing need be dropped, and trains the oldest first. Bound 0 is synchronous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.staleness import Candidate, Slots, Standing


@dataclass(frozen=True, slots=True)
class Windowed:
    """A batch is formed only if those that it leaves behind, running ones included, can still all be trained
    in time: at most j · P of them may be due within the next j steps. When nothing runs, the P oldest
    satisfy this, so waiting always ends. `evict` is the net under this argument.

    With spare groups as many of those left behind may be late: the slowest are given up.
    """

    slots: Slots

    def admit(self, standing: Standing) -> bool:
        return self.slots.free(standing)

    def select(self, standing: Standing, version: int) -> tuple[int, ...] | None:
        size = self.slots.groups_per_batch
        if len(standing.ready) < size:
            return None
        oldest_first = sorted(standing.ready, key=lambda group: (group.oldest_version, group.ticket))
        chosen, left = oldest_first[:size], oldest_first[size:]
        if self._late([*left, *standing.running], version + 1) > self.slots.spare:
            return None
        return tuple(group.ticket for group in chosen)

    def evict(self, standing: Standing, version: int) -> tuple[int, ...]:
        return self.slots.too_old(standing, version)

    def _late(self, groups: Sequence[Candidate], version: int) -> int:
        """How many groups cannot be trained within the bound when the next step trains `version`."""
        # The last version at which a group may be trained is its oldest plus the bound.
        due = sorted(max(group.oldest_version + self.slots.bound - version + 1, 0) for group in groups)
        placed = 0
        for steps in due:
            placed += placed < steps * self.slots.groups_per_batch
        return len(due) - placed
