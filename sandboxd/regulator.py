"""When a pool starts sandboxes, how many at a time and how many in all: what demand, host and failures say.

Pure but for `wake`. The ledger decides what to start; this says within which bounds, from one plan to the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandboxd.announcements import Announcement, Preparation, StartSpeed
from sandboxd.clock import Clock
from sandboxd.errors import InvalidRequest
from sandboxd.health import Health
from sandboxd.ledger import Bounds, Ledger, Plan
from sandboxd.pacing import Bucket, Pace
from sandboxd.sizing import Sizing
from sandboxd.slots import Slots
from sandboxd.start_times import StartTimes
from sandboxd.starting import Starter
from sandboxd.turns import Turns

# Of a daemon's pools: no caller of a burst, who waits for hundreds of others, knows it from nothing.
APART_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Regulation:
    """What a pool's settings say about its starts.

    `slots` are those of its backend, shared with other pools; None: its own, as many as its `start_limit`.
    `warm_limit` is the most that it keeps ready when demand is high; None: its target is fixed. In a burst
    its plans, and its commits, are at least `apart` seconds apart.
    """

    slots: Slots | None = None
    starts_per_second: float | None = None
    warm_limit: int | None = None
    apart: float = 0.0


class Regulator:
    """Of the pool called `name`; `wake` is called when others have left it room to start more."""

    def __init__(self, name: str, regulation: Regulation, bounds: Bounds, wake: Callable[[], None]) -> None:
        limit = bounds.start_limit
        self.slots = regulation.slots or Slots(Pace(floor=limit, ceiling=limit))
        self.health = Health(name)
        self.bucket = Bucket(regulation.starts_per_second)
        self.sizing = Sizing(*_warm(regulation, bounds))
        self._share = self.slots.share(wake)
        self._turns: Turns | None = None
        self.starts = StartTimes()
        self.held = False
        """Nothing is to be started: the backend is not there."""

    def turns(self, clock: Clock, at_once: Callable[[], int]) -> Turns:
        """Those of the pool's forks, which share its slots and its rate."""
        self._turns = Turns(self.slots, self.bucket, clock, at_once)
        return self._turns

    def rebound(self, regulation: Regulation, bounds: Bounds) -> None:
        """Other settings hold from now on; its slots, and what was measured and announced, it keeps."""
        self.bucket.rate = regulation.starts_per_second
        self.sizing.floor, self.sizing.ceiling = _warm(regulation, bounds)
        if regulation.slots is None:
            self.slots.pace.rebound(bounds.start_limit, bounds.start_limit)

    def forget_failures(self) -> None:
        """They were those of another template."""
        self.health = Health(self.health.name)

    def plan(self, ledger: Ledger, now: float, starter: Starter) -> tuple[Plan, float | None]:
        """What to do now, and when to ask again at the latest; None: when something happens."""
        ledger.bounds.warm_target = min(self.sizing.target(now), ledger.bounds.size_limit)
        may = self.bucket.available(now)
        overdue_at = self.slots.pace.overdue_at(now)
        room = 0 if self.held else self._room(ledger, prepared=starter.is_prepared)
        plan = ledger.plan(may_fill=self.health.may_fill(now), room=room if may is None else min(room, may))
        self.bucket.take(now, len(plan.start) + len(plan.resume))
        self._hold(ledger, plan.held_back, now, prepared=starter.is_prepared)
        times = [self.sizing.changes_at(now)]
        if not self.health.may_fill(now):
            times.append(self.health.fills_at)
        if plan.held_back and self.bucket.available(now) == 0:
            times.append(self.bucket.next_at(now))
        if plan.held_back:
            times.append(overdue_at)
        return plan, min((time for time in times if time is not None), default=None)

    def awaited(self, ledger: Ledger, now: float, starter: Starter) -> None:
        """Somebody waits from now on who changes no plan: others learn that more is wanted."""
        held_back = ledger.held_back(may_fill=self.health.may_fill(now))
        self._hold(ledger, held_back, now, prepared=starter.is_prepared)

    def _hold(self, ledger: Ledger, held_back: int, now: float, *, prepared: bool) -> None:
        """Says what this pool has of the slots, and what it would take."""
        left = self.bucket.available(now)
        wants = held_back if left is None else min(held_back, left)
        if not prepared:
            # Also what it held before it was to start from another template.
            self._share.hold(0, wants=0)
        else:
            # One that is held takes nothing when it is woken; two of them would wake one another for ever.
            self._share.hold(len(ledger.starting), wants=0 if self.held else wants)

    def _room(self, ledger: Ledger, *, prepared: bool) -> int:
        """How many may begin, as far as slots go."""
        if not prepared:
            # One fetches the image, others would only wait for it; and meanwhile it takes no slot from other
            # pools. That there is one too many when it comes back is forgiven.
            return 1 - len(ledger.starting)
        # What has ended since the last plan leaves its slots to this pool first, then to others.
        self._share.taken = len(ledger.starting)
        return self._share.room

    def started(self, now: float, seconds: float) -> None:
        """A sandbox is ready, so long after it was decided to start it."""
        self.health.succeeded(now)
        self.measured(now, seconds)

    def measured(self, now: float, seconds: float) -> None:
        """A start or a fork took so long."""
        self.starts.observe(now, seconds)
        self.sizing.start_seconds = self.starts.median() or seconds
        self.sizing.speed = self._speed()

    def announce(self, now: float, one: Announcement, bounds: Bounds) -> Preparation:
        """As `Announcements.prepare`. Raises InvalidRequest."""
        if one.count > bounds.size_limit:
            raise InvalidRequest(
                f"count = {one.count} is more than the pool's size_limit of {bounds.size_limit}: announce"
                " fewer, or raise it"
            )
        self.sizing.speed = self._speed()
        room = bounds.size_limit - self.sizing.floor
        return self.sizing.announcements.prepare(one, room, now, self.sizing.speed)

    def _speed(self) -> StartSpeed | None:
        """At the rate that the host was measured to start, or what its limit makes of the median."""
        usual, pace = self.starts.median(), self.slots.pace
        if usual is None:
            return None
        rate = pace.rate or pace.limit / max(usual, 1e-3)
        return StartSpeed(min(rate, self.bucket.rate or rate), usual)

    def end(self) -> None:
        """The pool starts nothing any more."""
        self._share.leave()
        if self._turns is not None:
            self._turns.leave()


def _warm(regulation: Regulation, bounds: Bounds) -> tuple[int, int]:
    """The least and the most that are kept ready."""
    return bounds.warm_target, max(bounds.warm_target, regulation.warm_limit or 0)
