"""Says which groups are worth a place in a batch, and ends a run in which none is any more."""

from __future__ import annotations

from rl.advantage import scored_advantages
from rl.errors import StarvedError
from rl.group_play import GroupPlay
from rl.plan import Plan
from rl.types import Cancelled, Group, Outcome, Unscored

BARREN_BATCHES = 20
"""So many batches' worth of groups in a row without any signal: the tasks are all too hard or too easy."""

LOST_BATCHES = 3
"""So many batches' worth of groups in a row lost to infrastructure: it will not come back by itself."""

STALE_BATCHES = 20
"""So many batches' worth of groups given up as too old without one trained step: the bound is too narrow."""

NON_FINITE_STEPS = 3
"""So many steps in a row that were not finite: the weights are beyond repair."""

LOST_PAUSE_SECONDS = 0.1
LOST_PAUSE_LIMIT_SECONDS = 5.0
"""After a group lost to infrastructure the next one waits, twice as long each time, up to the limit."""


class Sieve:
    """Of one run, by its plan. Its counts are of groups in a row."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._barren = self._lost = self._stale = self._non_finite = 0
        self._last_loss = ""

    @property
    def pause_seconds(self) -> float:
        """How long the next group waits for what took the last ones to come back."""
        return min(LOST_PAUSE_SECONDS * 2**self._lost, LOST_PAUSE_LIMIT_SECONDS) if self._lost else 0.0

    def judge(self, play: GroupPlay, group: Group) -> str | None:
        """Why the group is not worth a place in a batch; None when it is. Raises StarvedError."""
        if play.too_few(group) and play.ended:
            self.count_stale()
            return "stale"
        if play.too_few(group):
            self._count_lost(group)
            return "partial" if group.scored else "lost"
        self._lost = 0
        if scored_advantages(group, self._plan.advantages) is not None:
            self._barren = 0
            return None
        self._count_barren(group)
        return "zero_advantage" if self._plan.replace_silent else None

    def trained(self) -> None:
        """A step was taken."""
        self._non_finite = self._stale = 0

    def is_hopeless(self) -> bool:
        """A step was not finite: whether that was the last of too many in a row."""
        self._non_finite += 1
        return self._non_finite >= NON_FINITE_STEPS

    def count_stale(self) -> None:
        """A group was given up as too old. Raises StarvedError."""
        self._stale += 1
        if self._stale >= STALE_BATCHES * self._plan.groups_per_batch:
            raise StarvedError(
                f"{self._stale} groups in a row were too old to be trained on: raise staleness_bound, or "
                "choose the windowed policy, which waits for them"
            )

    def _count_lost(self, group: Group) -> None:
        self._lost += 1
        first = next(episode.outcome for episode in group.episodes if episode.reward is None)
        self._last_loss = _told(first)
        if self._lost >= LOST_BATCHES * self._plan.groups_per_batch:
            raise StarvedError(f"{self._lost} groups in a row were lost, the last to {self._last_loss}")

    def _count_barren(self, group: Group) -> None:
        self._barren += 1
        if self._barren >= BARREN_BATCHES * self._plan.groups_per_batch:
            raise StarvedError(
                f"{self._barren} groups in a row had equal rewards throughout, the last ones "
                f"{group.solve_rate:.0%} solved: choose easier or harder tasks, or larger groups"
            )


def _told(outcome: Outcome) -> str:
    """What took an episode that has no verdict, and where it can be helped what to do."""
    match outcome:
        case Unscored(kind, _, detail):
            return f"{kind}: {detail}"
        case Cancelled("timeout"):
            return (
                "the time limit: raise episode.seconds, or look at what generator and sandboxes do meanwhile"
            )
        case _:
            return str(outcome)
