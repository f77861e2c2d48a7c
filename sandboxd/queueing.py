"""In which order waiters are served. Pure: no clock, no I/O; O(log n) for each waiter that comes or goes.

1. A higher priority goes before a lower one, always.
2. Within a priority tenants share by weight: those that wait get sandboxes in the ratio of their weights.
3. Within a tenant who came first is served first.

A gang is one waiter that wants several sandboxes at once. It holds nothing while it waits, so gangs cannot
deadlock. When it is at the head nobody behind it is served before it, however few are free: what becomes
free gathers until the gang fits. The bound of backfill is zero, because nobody knows how long a lease will
last: whoever passed might keep the sandbox for longer than the gang may wait. Only a higher priority passes.

The shares are those of start-time fair queueing (Goyal, Vin and Cheng 1996) with the system's virtual time
of WF2Q+ (Bennett and Zhang 1997). Each tenant's line carries the virtual time at which its first waiter
begins; the smallest is served, and its line moves on by `count / weight`. While two tenants wait, what they
were given differs, each divided by its weight, by no more than one largest request of each, divided so. A
tenant that comes begins at the system's time, which every grant moves on: however many come, nobody who
waits is passed for ever.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sandboxd.lines import Line

DEFAULT_TENANT = "default"
PRIORITY_LIMIT = 10
# Virtual time in whole numbers: one sandbox of a tenant of weight 1. Sums stay exact, whatever the weights.
UNIT = 10**9
KEPT_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class Claim:
    """What a waiter wants: `count` sandboxes at once, on a tenant's account, before lower priorities."""

    count: int = 1
    tenant: str = DEFAULT_TENANT
    priority: int = 0


@dataclass(slots=True)
class _Lane:
    """A tenant's line within a priority. `start` is the virtual time at which its first waiter begins."""

    tenant: str
    weight: int
    order: int
    start: int
    line: Line = field(default_factory=Line)

    @property
    def cost(self) -> int:
        return UNIT // self.weight

    def begins(self, ticket: int) -> int:
        """The virtual time at which a waiter of this lane begins."""
        return self.start + self.line.before(ticket)[1] * self.cost


class _Band:
    """The lanes of one priority. It is forgotten when nobody waits in it: shares are of contended times."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self.lanes: dict[str, _Lane] = {}
        self.callers = 0
        self.sandboxes = 0
        self.now = 0
        self._weights = weights
        self._active_weight = 0
        # Each lane with its present start; entries with an earlier one, or of gone lanes, are skipped.
        self._heap: list[tuple[int, int, _Lane]] = []
        self._orders = itertools.count()

    def add(self, ticket: int, claim: Claim) -> None:
        lane = self._enter(claim.tenant)
        lane.line.add(ticket, claim.count)
        self.callers += 1
        self.sandboxes += claim.count

    def _enter(self, tenant: str) -> _Lane:
        lane = self.lanes.get(tenant)
        if lane is not None and lane.line:
            return lane
        if lane is None:
            lane = _Lane(tenant, self._weights.get(tenant, 1), next(self._orders), self.now)
            self.lanes[tenant] = lane
            self._push(lane)
        elif lane.start < self.now:
            lane.start = self.now
            self._push(lane)
        self._active_weight += lane.weight
        return lane

    def _push(self, lane: _Lane) -> None:
        if len(self._heap) > 2 * len(self.lanes) + KEPT_ENTRIES:
            # Names that come and leave behind a gang that waits would pile up.
            self._heap = [(each.start, each.order, each) for each in self.lanes.values()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (lane.start, lane.order, lane))

    def remove(self, ticket: int, tenant: str) -> None:
        lane = self.lanes[tenant]
        self.sandboxes -= lane.line.remove(ticket)
        self.callers -= 1
        if lane.line:
            return
        self._active_weight -= lane.weight
        if lane.start <= self.now:
            # Coming back it would begin at `now` in any case.
            del self.lanes[tenant]

    def head(self) -> int:
        """Who is next. Somebody must wait."""
        while True:
            start, _, lane = self._heap[0]
            present = self.lanes.get(lane.tenant) is lane and start == lane.start
            if present and lane.line:
                # Whoever comes from here on begins no earlier: nobody of this priority passes the head.
                self.now = max(self.now, start)
                return lane.line.first()
            heapq.heappop(self._heap)
            if present:
                # Nobody waits, and all who do begin later: as above.
                del self.lanes[lane.tenant]

    def serve(self) -> int:
        """Takes out the head and charges its tenant."""
        ticket = self.head()
        lane = self._heap[0][2]
        self.now += lane.line.sandboxes_of(ticket) * UNIT // self._active_weight
        lane.start += lane.line.sandboxes_of(ticket) * lane.cost
        heapq.heapreplace(self._heap, (lane.start, lane.order, lane))
        self.remove(ticket, lane.tenant)
        return ticket

    def last(self) -> tuple[int, int]:
        """Who would be served last, and the virtual time at which it begins. Somebody must wait."""
        lanes = [lane for lane in self.lanes.values() if lane.line]
        lane = max(lanes, key=lambda lane: (lane.begins(lane.line.last()), lane.order))
        return lane.line.last(), lane.begins(lane.line.last())

    def would_begin(self, tenant: str) -> int:
        """The virtual time at which a waiter would begin that came now."""
        lane = self.lanes.get(tenant)
        if lane is None:
            return self.now
        return max(self.now, lane.start) if not lane.line else lane.start + lane.line.sandboxes * lane.cost

    def before(self, ticket: int, tenant: str) -> tuple[int, int]:
        """How many callers of this band go before this one, and how many sandboxes they want."""
        own = self.lanes[tenant]
        begin = own.begins(ticket)
        callers, sandboxes = own.line.before(ticket)
        for lane in self.lanes.values():
            if lane is not own and lane.line:
                # Of two that begin at once, that of the lane that came first.
                ahead = begin - lane.start + (lane.order < own.order)
                more = lane.line.within(-(-ahead // lane.cost))
                callers, sandboxes = callers + more[0], sandboxes + more[1]
        return callers, sandboxes


class Queue:
    """Who waits for the sandboxes of one pool. `weights` are whole numbers by tenant; 1 for the others."""

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self._weights = dict(weights or {})
        self._claims: dict[int, Claim] = {}
        self._bands: dict[int, _Band] = {}
        self._priorities: list[int] = []
        self.sandboxes = 0
        """How many all waiters want together."""

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[int]:
        """The tickets in the order of arrival."""
        return iter(self._claims)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._claims

    def __getitem__(self, ticket: int) -> Claim:
        return self._claims[ticket]

    def by_tenant(self) -> dict[str, tuple[int, int]]:
        """How many callers of each tenant wait, and how many sandboxes they want."""
        found: dict[str, tuple[int, int]] = {}
        for band in self._bands.values():
            for lane in band.lanes.values():
                if lane.line:
                    callers, sandboxes = found.get(lane.tenant, (0, 0))
                    found[lane.tenant] = callers + len(lane.line), sandboxes + lane.line.sandboxes
        return found

    def reweigh(self, weights: Mapping[str, int]) -> None:
        """Other weights, for tenants that come from now on."""
        self._weights.clear()
        self._weights.update(weights)

    def add(self, ticket: int, claim: Claim) -> None:
        """A waiter comes. Tickets must be new."""
        if claim.priority not in self._bands:
            self._bands[claim.priority] = _Band(self._weights)
            bisect.insort(self._priorities, claim.priority)
        self._bands[claim.priority].add(ticket, claim)
        self._claims[ticket] = claim
        self.sandboxes += claim.count

    def remove(self, ticket: int) -> None:
        """A waiter leaves without having been served; its tenant is charged nothing."""
        claim = self._claims[ticket]
        self._bands[claim.priority].remove(ticket, claim.tenant)
        self._forget(ticket, claim.priority)

    def head(self) -> int | None:
        """Who must be served next; None when nobody waits."""
        return self._bands[self._priorities[-1]].head() if self._priorities else None

    def serve(self) -> int:
        """Takes out the head, which must exist, and charges its tenant; returns its ticket."""
        priority = self._priorities[-1]
        ticket = self._bands[priority].serve()
        self._forget(ticket, priority)
        return ticket

    def before(self, ticket: int) -> tuple[int, int]:
        """How many callers are served before this one if nobody comes or leaves, and want how many
        sandboxes.
        """
        claim = self._claims[ticket]
        callers, sandboxes = self._bands[claim.priority].before(ticket, claim.tenant)
        for priority in self._priorities[bisect.bisect(self._priorities, claim.priority) :]:
            callers += self._bands[priority].callers
            sandboxes += self._bands[priority].sandboxes
        return callers, sandboxes

    def last_behind(self, claim: Claim) -> int | None:
        """Who would be served last, if that is after a waiter that came now with this claim; else None."""
        if not self._priorities or self._priorities[0] > claim.priority:
            return None
        lowest = self._bands[self._priorities[0]]
        ticket, begin = lowest.last()
        if self._priorities[0] < claim.priority or lowest.would_begin(claim.tenant) < begin:
            return ticket
        return None

    def _forget(self, ticket: int, priority: int) -> None:
        self.sandboxes -= self._claims.pop(ticket).count
        if not self._bands[priority].callers:
            del self._bands[priority]
            self._priorities.remove(priority)

    def check(self) -> None:
        """Raises AssertionError where the sums do not agree with who waits: a bug of this module."""
        wanted = sum(claim.count for claim in self._claims.values())
        lines = [lane.line for band in self._bands.values() for lane in band.lanes.values()]
        if not wanted == self.sandboxes == sum(line.sandboxes for line in lines):
            raise AssertionError(f"{wanted} sandboxes are wanted, but {self.sandboxes} are counted")
        if not len(self) == sum(len(line) for line in lines) == sum(b.callers for b in self._bands.values()):
            raise AssertionError(f"{len(self)} callers wait, but the lines hold others")
