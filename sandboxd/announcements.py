"""Sandboxes that somebody has said will be wanted: how many are to be ready when.

Pure: the caller says the time. An announcement is begun so early that all of it is ready when it is due, as
fast as the pool's starts are. What is asked for from then on uses it up; the rest is kept until it expires.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sandboxd.errors import InvalidRequest

# Starts are planned to take so much longer than they were measured to take, and at least so long.
MARGIN = 1.25
LEAST_SECONDS = 1.0
# More would be a mistake of whoever announces.
ANNOUNCEMENTS = 1000


@dataclass(slots=True)
class Announcement:
    """So many sandboxes, wanted at `due` and kept until `expiry`; `begun` once they are started."""

    id: str
    count: int
    due: float
    expiry: float
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a pool will do about an announcement. Times are in seconds of its clock.

    `count` is how many it can have beside what else it keeps. `ready` is later than asked for where the time
    is too short, and None where no start was measured yet.
    """

    count: int
    begin: float
    ready: float | None
    expiry: float


@dataclass(frozen=True, slots=True)
class StartSpeed:
    """How fast a pool starts sandboxes: so many in a second when many are wanted, each in `usual` seconds."""

    per_second: float
    usual: float

    def seconds(self, count: int) -> float:
        """How long it takes to have so many, with a margin."""
        return MARGIN * count / self.per_second


class Announcements:
    """Of one pool."""

    def __init__(self) -> None:
        self._by_id: dict[str, Announcement] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def total(self) -> int:
        """Sandboxes of all of them together."""
        return sum(one.count for one in self._by_id.values())

    def add(self, announcement: Announcement) -> None:
        """Takes the place of an earlier one of the same id. Raises InvalidRequest where they are too many."""
        if announcement.id not in self._by_id and len(self) >= ANNOUNCEMENTS:
            raise InvalidRequest(
                f"{len(self)} announcements are kept already; withdraw some, or wait for their end"
            )
        self.withdraw(announcement.id)
        if announcement.count:
            self._by_id[announcement.id] = announcement

    def withdraw(self, announcement_id: str) -> None:
        """Forgets one; nothing where there is none."""
        self._by_id.pop(announcement_id, None)

    def take(self, now: float, count: int, speed: StartSpeed | None) -> int:
        """So many are asked for: what has begun is used up, what is due first first. Returns the rest."""
        if not self._by_id:
            return count
        self.ready(now, speed)
        for announcement in self._in_order():
            taken = min(count, announcement.count) if announcement.begun else 0
            announcement.count -= taken
            count -= taken
            if not announcement.count:
                self.withdraw(announcement.id)
        return count

    def ready(self, now: float, speed: StartSpeed | None) -> int:
        """How many are to be ready or on their way by now.

        Forgets what has expired. Without a measured speed everything is begun at once.
        """
        if not self._by_id:
            return 0
        for announcement in self._in_order():
            if announcement.expiry <= now:
                self.withdraw(announcement.id)
        for announcement, begin in self._begins(speed):
            announcement.begun = announcement.begun or begin <= now
        return self.begun

    @property
    def begun(self) -> int:
        """Sandboxes of those that have begun."""
        return sum(one.count for one in self._by_id.values() if one.begun)

    def next_change(self, speed: StartSpeed | None) -> float | None:
        """When `ready` will say something else if nothing happens until then; None if never."""
        if not self._by_id:
            return None
        times = [one.expiry for one in self._by_id.values()]
        times += [begin for one, begin in self._begins(speed) if not one.begun]
        return min(times, default=None)

    def prepare(self, one: Announcement, room: int, now: float, speed: StartSpeed | None) -> Preparation:
        """Adds one, as far as there is room beside the others, and says what will be done.

        Raises InvalidRequest.
        """
        self.withdraw(one.id)
        one.count = max(0, min(one.count, room - self.total()))
        self.add(one)
        if not one.count:
            return Preparation(0, now, now, one.expiry)
        begin = max(now, self.begin(one.id, speed))
        ready = None
        if speed is not None:
            ready = max(one.due, begin + speed.seconds(one.count) + speed.usual)
        return Preparation(one.count, begin, ready, one.expiry)

    def begin(self, announcement_id: str, speed: StartSpeed | None) -> float:
        """When the starts for it must begin; minus infinity where no speed was measured."""
        return next(begin for one, begin in self._begins(speed) if one.id == announcement_id)

    def _begins(self, speed: StartSpeed | None) -> list[tuple[Announcement, float]]:
        """Planned backwards from the last that is due: those before it leave it only the time after them."""
        begins, after = [], math.inf
        for one in reversed(self._in_order()):
            if speed is None:
                begins.append((one, -math.inf))
                continue
            after = min(one.due - LEAST_SECONDS, after) - speed.seconds(one.count)
            begins.append((one, after - MARGIN * speed.usual))
        return begins

    def _in_order(self) -> list[Announcement]:
        return sorted(self._by_id.values(), key=lambda one: (one.due, one.id))
