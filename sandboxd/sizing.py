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

import math
from collections import deque
from dataclasses import dataclass, field

from sandboxd.announcements import Announcements, StartSpeed

# Arrivals older than this count a third, and so on.
MEMORY_SECONDS = 30.0
# In this time without arrivals the target falls by half.
HALVING_SECONDS = 60.0
# Demand that has faded to this is over.
GONE = 0.5
# Assumed until a start has been measured.
START_SECONDS = 1.0


@dataclass(slots=True)
class Sizing:
    """Between `floor` and `ceiling`; equal ones mean a fixed target. Announcements pass the ceiling; they are
    begun by the `speed` of starts, None while it was not measured.
    """

    floor: int
    ceiling: int
    start_seconds: float = START_SECONDS
    speed: StartSpeed | None = None
    announcements: Announcements = field(default_factory=Announcements)
    _rate: float = field(init=False, default=0.0)
    _rated: float = field(init=False, default=0.0)
    _recent: deque[tuple[float, int]] = field(init=False, default_factory=deque)
    _recent_count: int = field(init=False, default=0)
    _held: float = field(init=False, default=0.0)
    _held_at: float = field(init=False, default=0.0)

    @property
    def adapts(self) -> bool:
        return self.ceiling > self.floor

    def arrived(self, now: float, count: int = 1) -> None:
        """So many sandboxes are asked for."""
        count = self.announcements.take(now, count, self.speed)
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

    def stop(self) -> None:
        """Nothing is to be ready any more."""
        self.floor = self.ceiling = 0
        self.announcements = Announcements()

    def target(self, now: float) -> int:
        """How many should be ready, or on their way."""
        return self._demanded(now) + self.announcements.ready(now, self.speed)

    def changes_at(self, now: float) -> float | None:
        """When the target will be another if nothing arrives; None: it stays."""
        announced = self.announcements.next_change(self.speed)
        if self._demanded(now) <= self.floor:
            return announced
        falls = self._falls_at(now)
        return falls if announced is None else min(falls, announced)

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
