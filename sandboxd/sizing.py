"""How many sandboxes a pool should keep ready: enough for what arrives while the next ones start.

Pure: the caller says the time. The target is

    λ · S + reserve,   reserve = max(√(λ · S), what arrived within the last S beyond λ · S)

with λ the arrivals a second (exponentially weighted) and S the seconds from the decision to start a sandbox
until it is ready. λ · S arrive on average meanwhile (Little's law); the square root covers the scatter of
arrivals that come one by one (the square-root rule of staffing: Halfin and Whitt, 1981), and what has been
seen covers those that come in groups. The target rises at once and falls by half in `HALVING_SECONDS`, so
that a pause between two bursts does not throw away what the second needs. What is announced comes on top.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

# Arrivals older than this count a third, and so on.
MEMORY_SECONDS = 30.0
# In this time without arrivals the target falls by half.
HALVING_SECONDS = 60.0
# Demand that has faded to this is over.
GONE = 0.5
# Assumed until a start has been measured.
START_SECONDS = 1.0
# What is announced is begun so much sooner than its starts should take.
AHEAD = 1.25
# What was announced and not asked for is kept for so long after its time.
KEPT_SECONDS = 120.0


@dataclass(slots=True)
class _Announced:
    """So many are to be ready `by` a time. What is asked for from `since` on counts against them."""

    count: int
    by: float
    since: float


@dataclass(slots=True)
class Sizing:
    """Between `floor` and `ceiling`; equal ones mean a fixed target. Announcements pass the ceiling."""

    floor: int
    ceiling: int
    start_seconds: float = START_SECONDS
    _rate: float = field(init=False, default=0.0)
    _rated: float = field(init=False, default=0.0)
    _recent: deque[tuple[float, int]] = field(init=False, default_factory=deque)
    _recent_count: int = field(init=False, default=0)
    _held: float = field(init=False, default=0.0)
    _held_at: float = field(init=False, default=0.0)
    _announced: dict[int, _Announced] = field(init=False, default_factory=dict)
    _names: itertools.count[int] = field(init=False, default_factory=itertools.count)

    @property
    def adapts(self) -> bool:
        return self.ceiling > self.floor

    def arrived(self, now: float, count: int = 1) -> None:
        """So many sandboxes are asked for."""
        count = self._use_announced(now, count)
        if not self.adapts or not count:
            return
        self._rate = self.rate(now) + count / MEMORY_SECONDS
        self._rated = now
        self._recent.append((now, count))
        self._recent_count += count
        self._hold(now)

    def rate(self, now: float) -> float:
        """Arrivals a second of late."""
        return self._rate * math.exp(-(now - self._rated) / MEMORY_SECONDS)

    def announce(self, now: float, count: int, by: float, per_second: float | None = None) -> int:
        """So many are to be ready at the time `by`; a host that starts `per_second` (None: one after the
        other) begins in time for that. Returns a name for `withdraw`.
        """
        each = self.start_seconds if not per_second else 1.0 / per_second
        name = next(self._names)
        since = by - AHEAD * (self.start_seconds + count * each)
        self._announced[name] = _Announced(count, by, max(now, since))
        return name

    def withdraw(self, name: int) -> None:
        """What was announced is not wanted any more; nothing when it is over."""
        self._announced.pop(name, None)

    def stop(self) -> None:
        """Nothing is to be ready any more."""
        self.floor = self.ceiling = 0
        self._announced.clear()

    def target(self, now: float) -> int:
        """How many should be ready, or on their way."""
        for name, announced in list(self._announced.items()):
            if not announced.count or now >= announced.by + KEPT_SECONDS:
                del self._announced[name]
        begun = sum(announced.count for announced in self._announced.values() if announced.since <= now)
        return self._demanded(now) + begun

    def changes_at(self, now: float) -> float | None:
        """When the target will be another if nothing arrives; None: it stays."""
        times = [
            announced.since if announced.since > now else announced.by + KEPT_SECONDS
            for announced in self._announced.values()
        ]
        if self._demanded(now) > self.floor:
            times.append(self._falls_at(now))
        return min(times, default=None)

    def _demanded(self, now: float) -> int:
        if not self.adapts:
            return self.floor
        faded = self._faded(now)
        # A hair above a whole number is that number, else a fall would be late by one rounding.
        wanted = math.ceil(faded - 1e-6) if faded > GONE + 1e-6 else 0
        return max(self.floor, min(self.ceiling, wanted))

    def _hold(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self.start_seconds:
            self._recent_count -= self._recent.popleft()[1]
        mean = self.rate(now) * self.start_seconds
        reserve = max(math.sqrt(mean), self._recent_count - mean)
        # What is above the ceiling would only delay the fall.
        wanted = min(mean + reserve, float(self.ceiling))
        self._held, self._held_at = max(wanted, self._faded(now)), now

    def _faded(self, now: float) -> float:
        return self._held * math.exp2((self._held_at - now) / HALVING_SECONDS)

    def _falls_at(self, now: float) -> float:
        """When the held demand has faded to the next whole number below the target."""
        below = max(self._demanded(now) - 1, GONE)
        return max(now, self._held_at + HALVING_SECONDS * math.log2(self._held / below))

    def _use_announced(self, now: float, count: int) -> int:
        """What is due first is what is asked for first. Returns how many of the count nobody announced."""
        for announced in sorted(self._announced.values(), key=lambda each: each.by):
            if announced.since <= now:
                used = min(count, announced.count)
                announced.count -= used
                count -= used
        return count
