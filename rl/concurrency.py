"""How many episodes run at once: fewer while something is overrun, more again once everything keeps up.

Additive increase and multiplicative decrease (Chiu and Jain 1989), as for the window of a TCP connection:
what the sandboxes, the engine's memory and the trainer can take is known only by trying, and changes. Pure:
it sees numbers and a clock, waits for nothing and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

PREEMPTED, LOST, FULL, QUEUED, SHORT = 0.8, 0.8, 0.9, 0.9, 0.8
"""What is left of the episodes after a cut, by its cause."""

KV_FULL, KV_EASY = 0.9, 0.7
"""Above the first share of the cache a long dialogue preempts others; below the second there is room."""

QUEUE_SHARE = 0.5
"""Requests that wait for the engine, in proportion to those that it runs."""

LOST_SHARE, LOST_LEAST = 0.2, 4
"""So many of the episodes that ended were lost to infrastructure, and it is no single accident."""

LONG_WAIT_SECONDS, LONG_WAIT_STARTS = 5.0, 2.0
"""Calls that wait for a sandbox longer than this, and than so many starts take, wait for others to end."""

SETTLE_SECONDS = 5.0
"""A cut shows only when episodes have ended; before that no second one is made."""

RAMP = 16
"""From nothing to the most in so many raises, each of which takes as long as all episodes do once."""

RISE_SHARE = 0.25
"""But by no larger part of the limit at once: of 120 the sixteenth part doubles a limit of 8."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What is to be seen at one moment. Totals count from the start and never fall.

    `running` episodes are under way; `scored` ended with a verdict, `lost` without one by the fault of
    infrastructure. `ready` groups wait for the trainer, who takes `batch` at a time. Of the engine:
    `kv_usage`, the share of its cache that is held, `preemptions` in all, requests `queued`. Of the
    sandboxes: `waiting` calls, the `oldest_wait` and the usual `start`, both in seconds.
    """

    running: int
    scored: int = 0
    lost: int = 0
    ready: int = 0
    batch: int = 1
    kv_usage: float = 0.0
    preemptions: int = 0
    queued: int = 0
    waiting: int = 0
    oldest_wait: float = 0.0
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """At `at` seconds on the controller's clock the limit went from `before` to `after`, for `reason`."""

    at: float
    before: int
    after: int
    reason: str

    def __str__(self) -> str:
        return f"episodes at once: {self.before} → {self.after}, for {self.reason}"


class ConcurrencyController:
    """Keeps `limit` between 1 and `most`; begins at the most, so that it costs nothing where all is well."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self.most = most
        self.limit = most
        self.cuts = 0
        self._clock = clock
        self._last: Signals | None = None
        self._since = Signals(0)
        """What was seen at the last change: whatever came before says nothing about the present limit."""
        self._changed_at = -math.inf

    def update(self, seen: Signals) -> Change | None:
        """Looks, and changes the limit by one step at most."""
        if self._last is None:
            self._last = self._since = seen
        last, self._last = self._last, seen
        cut = self._cut(seen, last)
        if cut is not None:
            factor, reason = cut
            if not self._settled(seen):
                return None
            # From what runs: a limit that is not reached would have to be cut often before it did anything.
            held = min(self.limit, max(seen.running, 1))
            if held < self.limit:
                reason += f", with {held} under way"
            return self._change(max(1, min(held - 1, int(held * factor))), reason, seen)
        if self._may_grow(seen):
            step = math.ceil(min(self.most / RAMP, RISE_SHARE * self.limit))
            return self._change(min(self.most, self.limit + step), "all of them ended well", seen)
        return None

    def _cut(self, seen: Signals, last: Signals) -> tuple[float, str] | None:
        """What is overrun now, as the share to go down to and the reason in words."""
        ended = seen.scored + seen.lost - self._since.scored - self._since.lost
        lost = seen.lost - self._since.lost
        if seen.preemptions > last.preemptions:
            count = seen.preemptions - last.preemptions
            return PREEMPTED, f"the engine preempted {count}, its cache {seen.kv_usage:.0%} full"
        if seen.kv_usage > KV_FULL:
            # They may have been while the last cut was to show.
            before = seen.preemptions - self._since.preemptions
            told = f", and {before} were preempted since the last change" if before else ""
            return FULL, f"the engine's cache is {seen.kv_usage:.0%} full{told}"
        if lost >= LOST_LEAST and lost > LOST_SHARE * ended:
            return LOST, f"{lost} of the last {ended} were lost to infrastructure"
        if seen.waiting and seen.oldest_wait > max(LONG_WAIT_SECONDS, LONG_WAIT_STARTS * seen.start):
            return SHORT, f"{seen.waiting} wait for a sandbox, the first for {seen.oldest_wait:.0f} s"
        if min(seen.queued, last.queued) > QUEUE_SHARE * max(seen.running - seen.queued, 1):
            return QUEUED, f"{seen.queued} requests wait for the engine"
        return None

    def _settled(self, seen: Signals) -> bool:
        """Whether what is seen is due to the present limit. At the floor there is nothing left to cut."""
        late = self._clock() - self._changed_at >= SETTLE_SECONDS
        return late and seen.running <= self.limit and self.limit > 1

    def _may_grow(self, seen: Signals) -> bool:
        """Only what is used up is raised, and only when more of it would be of use and has been earned."""
        if self.limit >= self.most or seen.running < self.limit:
            return False
        trainer_has_enough = seen.ready >= seen.batch
        if trainer_has_enough or seen.waiting or seen.kv_usage > KV_EASY:
            return False
        return seen.scored - self._since.scored >= self.limit

    def _change(self, limit: int, reason: str, seen: Signals) -> Change:
        change = Change(self._clock(), self.limit, max(1, limit), reason)
        self.cuts += change.after < change.before
        self.limit, self._since, self._changed_at = change.after, seen, change.at
        return change
