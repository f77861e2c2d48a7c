"""First in, first out: batches are what was admitted together, so a run's order does not depend on timing."""

from __future__ import annotations

from dataclasses import dataclass

from rl.staleness import Slots, Standing


@dataclass(frozen=True, slots=True)
class InOrder:
    """Trains groups in the order of admission. With bound 1 this is one-step-off training.

    The bound holds by itself: when a group is admitted at most (S + 1) · P - 1 are ahead of it, so it is in
    one of the next S + 1 batches, the first of which trains at the version of its admission or later.
    """

    slots: Slots

    def admit(self, standing: Standing) -> bool:
        return self.slots.free(standing)

    def select(self, standing: Standing, version: int) -> tuple[int, ...] | None:
        ready = {group.ticket for group in standing.ready}
        first = sorted([*ready, *(group.ticket for group in standing.running)])
        chosen = tuple(first[: self.slots.groups_per_batch])
        return chosen if len(chosen) == self.slots.groups_per_batch and ready.issuperset(chosen) else None

    def evict(self, standing: Standing, version: int) -> tuple[int, ...]:
        return self.slots.too_old(standing, version)
