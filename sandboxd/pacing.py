"""How many sandboxes may be starting at once on a host that nobody has measured, and how fast they may begin.

Pure: the caller says the time. Additive increase, multiplicative decrease (Chiu and Jain, 1989), steered by
what the host achieves and not by how long a start takes: once the processors are busy, each start takes
longer in proportion to how many there are (Little's law, L = X · W) while as many as before are ready each
second. A threshold on latency cannot tell that harmless state from a host in trouble. So the limit is held
where one more start at once yields no more ready sandboxes a second, and compared with its neighbours again
and again, as PCC (Dong et al., NSDI 2015) does for a connection's rate with measured utility. The utility
here is the successes a second by Little's law,

    (L / W) · ok / (ok + failed)

with L the mean number under way and W the mean duration of the starts of one round: unlike a count of what
became ready in a span of time it holds for the short bursts that a pool asks for, too. When a host achieves
less than half of what it did at the same limit, which is to say that a start takes more than twice as long
out of proportion to their number, or when most starts fail, the limit is halved and the host measured anew
from there.

A start that has taken many times as long as others is most likely one that hangs, and does nothing that the
limit is there for. It counts no longer, or one hanging start in twenty would hold nearly all slots, each
until its time limit; there are never more than `ceiling` under way with them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

# A round is over after so many starts for each that may be under way, and at least so many.
ROUND_TURNS, ROUND_LEAST = 4, 16
# Doubling needs to know less: what it brings is plain to see.
FIRST_TURNS, FIRST_LEAST = 1, 8
# A collapse is believed before its round is over after half a turn, and at least so many starts.
COLLAPSE_LEAST, COLLAPSE_EARLY = 8, 0.25
# What counts as no change: utility must rise with this power of the limit (1 is in proportion, 0 not at all).
WORTH = 0.15
# Below this share of what was, the limit is halved; above the inverse, the host has become another.
COLLAPSE = 0.5
# How much a round weighs against what is known of the same limit.
WEIGHT = 0.3
# Below this share of the limit under way, a round says nothing about the limit.
SATURATED = 0.75
# A start is overdue after so many times what the last ones that succeeded took, and so many seconds at least.
OVERDUE, OVERDUE_LEAST = 6.0, 0.05
# Rounds without a trial after one that brought nothing; doubled each time up to the last.
REST_FIRST, REST_LAST = 1, 8


@dataclass(slots=True, eq=False)
class Attempt:
    """A start under way: when it began, what had been under way until then, in which round."""

    began: float
    area: float
    number: int
    is_overdue: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class _Round:
    """What the starts that began and ended at one limit came to; `hung` are the seconds, summed up, for which
    those were counted that turned out to be overdue.
    """

    number: int = 0
    began: float = 0.0
    last: float = 0.0
    ok: int = 0
    failed: int = 0
    seconds: float = 0.0
    ok_seconds: float = 0.0
    area: float = 0.0
    hung: float = 0.0

    @property
    def ended(self) -> int:
        return self.ok + self.failed

    @property
    def under_way(self) -> float:
        """How many there were at once, on average over the starts' durations."""
        return self.area / self.seconds if self.seconds else 0.0

    @property
    def utility(self) -> float:
        if not self.seconds or self.last <= self.began:
            return 0.0
        at_work = max(1.0, self.under_way - self.hung / (self.last - self.began))
        return at_work * self.ok / self.seconds

    @property
    def fails(self) -> bool:
        """Whether most do, and by more than chance: one standard deviation of a fair coin."""
        return self.failed - self.ok >= math.sqrt(max(1, self.ended))


class Pace:
    """The limit on starts at once of one host. `limit` is an integer from `floor` to `ceiling`.

    `first` is where it begins; it doubles from there as long as that brings something. What is under way is
    counted between `begin` and `end`, in seconds of any clock that only goes forward.
    """

    def __init__(self, *, floor: int = 1, ceiling: int, first: int | None = None) -> None:
        self.floor, self.ceiling = min(floor, ceiling), ceiling
        self.limit = max(self.floor, min(ceiling, first or ceiling))
        self.backed_off_total = 0
        self._round = _Round()
        self._base: tuple[int, float] | None = None
        self._doubling, self._doubted = True, False
        self._upwards = True
        self._rest = REST_FIRST
        self._resting = 0
        self._usual: float | None = None
        self._attempts: deque[Attempt] = deque()
        self._under_way = 0
        self._overdue = 0
        self._area = 0.0
        self._last = -math.inf

    def rebound(self, floor: int, ceiling: int) -> None:
        """Other bounds hold from now on."""
        self.floor, self.ceiling = min(floor, ceiling), ceiling
        self.limit = max(self.floor, min(ceiling, self.limit))

    @property
    def rate(self) -> float | None:
        """Sandboxes a second that the host has ready at this limit; None before it was measured."""
        return self._base[1] if self._base and self._base[1] > 0 else None

    def free(self, taken: int) -> int:
        """How many more may begin where so many have; negative after the limit was lowered."""
        return min(self.limit + self._overdue, self.ceiling) - taken

    def overdue_at(self, now: float) -> float | None:
        """Counts no longer what is overdue by now, and returns when the next one will be; None: no one."""
        while self._attempts:
            first = self._attempts[0]
            if not first.has_ended:
                if self._usual is None:
                    return None
                after = first.began + max(OVERDUE_LEAST, OVERDUE * self._usual)
                if now < after:
                    return after
                self._pass(now)
                first.is_overdue = True
                self._round.hung += now - max(first.began, self._round.began)
                self._under_way -= 1
                self._overdue += 1
            self._attempts.popleft()
        return None

    def begin(self, now: float) -> Attempt:
        """A start begins; what it returns is to be given to `end`."""
        if math.isinf(self._last):
            self._round.began = now
        self._pass(now)
        self._under_way += 1
        attempt = Attempt(now, self._area, self._round.number)
        self._attempts.append(attempt)
        return attempt

    def end(self, attempt: Attempt, now: float, *, ok: bool | None) -> None:
        """A start has ended well or badly, or (None) so that it says nothing about the host: it was
        cancelled, or cannot succeed on any.
        """
        self._pass(now)
        attempt.has_ended = True
        if attempt.is_overdue:
            self._overdue -= 1
        else:
            self._under_way -= 1
        self.overdue_at(now)
        current = self._round
        current.last = now
        if ok is None or attempt.number != current.number or self.floor == self.ceiling:
            return
        current.ok += ok
        current.failed += not ok
        # How long one hung says nothing; the others tell what was under way beside it.
        if ok or not attempt.is_overdue:
            current.seconds += now - attempt.began
            current.area += self._area - attempt.area
            current.ok_seconds += ok * (now - attempt.began)
        turns, least = (FIRST_TURNS, FIRST_LEAST) if self._doubling else (ROUND_TURNS, ROUND_LEAST)
        if current.ended >= max(least, turns * self.limit) or self._collapses():
            self._judge()

    def _pass(self, now: float) -> None:
        if self._under_way:
            self._area += self._under_way * (now - self._last)
        self._last = now

    def _collapses(self) -> bool:
        """A host in trouble is not given a whole round, which there takes long."""
        current = self._round
        if current.ended < max(COLLAPSE_LEAST, self.limit // 2) or not self._is_saturated():
            return False
        base = self._base
        return current.fails or (base is not None and current.utility < COLLAPSE_EARLY * base[1])

    def _is_saturated(self) -> bool:
        return self._round.under_way >= SATURATED * self.limit

    def _judge(self) -> None:
        saturated = self._is_saturated()
        utility = 0.0 if self._round.fails else self._round.utility
        if self._round.ok:
            self._usual = self._round.ok_seconds / self._round.ok
        self._round = _Round(self._round.number + 1, began=self._last, last=self._last)
        if not saturated:
            return
        base = self._base
        if base is None:
            self._settle(utility)
        elif self.limit == base[0]:
            self._compare(base, utility)
        elif utility > 0 and utility >= base[1] * (self.limit / base[0]) ** WORTH:
            # Worth it, or no loss: this is where to go on from, in the same direction.
            self._base = (self.limit, utility)
            self._rest = REST_FIRST
            self._try_next()
            self._doubted = False
        else:
            # A lucky round before makes a good trial look bad: doubling is given up only the second time.
            if not self._doubling:
                self._upwards = not self._upwards
            self._doubling, self._doubted = self._doubling and not self._doubted, True
            self._resting, self._rest = self._rest, min(2 * self._rest, REST_LAST)
            self.limit = base[0]

    def _settle(self, utility: float) -> None:
        """The first round since the host became another."""
        if utility <= 0:
            self._back_off()
            return
        self._base = (self.limit, utility)
        self._upwards = True
        self._try_next()

    def _compare(self, base: tuple[int, float], utility: float) -> None:
        """A round at the limit that is known."""
        if utility < COLLAPSE * base[1]:
            self._back_off()
            return
        if utility * COLLAPSE > base[1]:
            self._base, self._rest, self._resting = (self.limit, utility), REST_FIRST, 0
            self._doubling, self._doubted, self._upwards = True, False, True
        else:
            self._base = (self.limit, base[1] + WEIGHT * (utility - base[1]))
        if self._resting > 0:
            self._resting -= 1
        else:
            self._try_next()

    def _back_off(self) -> None:
        self.backed_off_total += 1
        self._base, self._doubling, self._rest, self._resting = None, False, REST_FIRST, 0
        self.limit = max(self.floor, self.limit // 2)

    def _try_next(self) -> None:
        """To a neighbour of the limit; at an end of the range to the other side."""
        if self.limit == self.ceiling:
            self._upwards = False
        elif self.limit == self.floor:
            self._upwards = True
        step = max(1, self.limit // 4)
        if self._upwards:
            self.limit = min(self.ceiling, 2 * self.limit if self._doubling else self.limit + step)
        else:
            self._doubling = False
            self.limit = max(self.floor, self.limit - max(1, self.limit // 5))


@dataclass(slots=True)
class Bucket:
    """At most `rate` starts a second on average, and one second's worth at once (token bucket); a `rate` of
    None is no bound.
    """

    rate: float | None = None
    _tokens: float = field(init=False, default=0.0)
    _last: float | None = field(init=False, default=None)

    @property
    def _depth(self) -> float:
        return max(1.0, self.rate or 0.0)

    def available(self, now: float) -> int | None:
        """How many may begin at this moment; None: any number."""
        if self.rate is None:
            return None
        if self._last is None:
            self._tokens = self._depth
        else:
            self._tokens = min(self._depth, self._tokens + self.rate * (now - self._last))
        self._last = now
        # A hair less than a token is one: the sum of many small waits.
        return max(0, math.floor(self._tokens + 1e-9))

    def take(self, now: float, count: int = 1) -> float:
        """So many begin, whether they may or not; returns for how long, in seconds, those without a token
        are to wait.
        """
        if self.rate is None:
            return 0.0
        self.available(now)
        self._tokens -= count
        return max(0.0, -self._tokens / self.rate)

    def next_at(self, now: float) -> float:
        """When one more may begin."""
        if self.rate is None or self.available(now):
            return now
        return now + (1.0 - self._tokens) / self.rate
