"""Trains what is finished and gives up what is late: a hard bound, no waits, a bias against length."""

from __future__ import annotations

from dataclasses import dataclass

from rl.staleness import Slots, Standing


@dataclass(frozen=True, slots=True)
class DropLate:
    """Waits for no group in particular. While the trainer waits, running groups that are due at this step and
    have `min_samples` verdicts are ended with those, as many as the batch lacks, the fullest first. Once a
    step has begun, what would be too old after it is given up at once, and others start in its place.

    What is slow is trained on less often than what is fast; `rl.length_bias` measures by how much.
    """

    slots: Slots
    min_samples: int = 2

    def admit(self, standing: Standing) -> bool:
        return self.slots.free(standing)

    def select(self, standing: Standing, version: int) -> tuple[int, ...] | None:
        oldest_first = sorted(standing.ready, key=lambda group: (group.oldest_version, group.ticket))
        chosen = oldest_first[: self.slots.groups_per_batch]
        return tuple(group.ticket for group in chosen) if len(chosen) == self.slots.groups_per_batch else None

    def evict(self, standing: Standing, version: int) -> tuple[int, ...]:
        return self.slots.too_old(standing, version) + self._cut(standing, version)

    def _cut(self, standing: Standing, version: int) -> tuple[int, ...]:
        """Running groups to be trained with what they have."""
        lacking = self.slots.groups_per_batch - len(standing.ready)
        if standing.held or lacking <= 0:
            return ()
        due = [
            group
            for group in standing.running
            if version - group.oldest_version == self.slots.bound and group.scored >= self.min_samples
        ]
        fullest_first = sorted(due, key=lambda group: (-group.scored, group.ticket))
        return tuple(group.ticket for group in fullest_first[:lacking])
