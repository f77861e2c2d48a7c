"""Who is starting, warm, active, waiting or being deleted, and what is to be done about it.

Pure: no tasks, no clock, no I/O. Every transition is a plain method, and a grant flips WARM to ACTIVE
before its waiter runs, so that no two waiters can be given one sandbox. `plan` looks at everything and
says what to start, resume and grant; the pool then does it.

    new ─▶ STARTING ─▶ WARM ─▶ ACTIVE ─▶ DELETING ─▶ gone
              │  ▲     │  ▲ └───────────────▲  ▲
              │  │     ▼  │ (it answers)    │  │
              │  │    DOUBTED ──────────────┤  │
              │  │                          ▼  │ (its time is over, or its place is needed)
              │  │                      QUARANTINED   failed, and kept to be looked at
              │  │     ▲ (it is as new, under a new name)
              │  │     └── RESETTING ◀─ ACTIVE
              ▼  │ (a slot is free)
           BACKING OFF   between two attempts: counts towards the size, holds no starting slot

A warm sandbox that has not answered of late is DOUBTED: it counts as warm, but is granted to nobody before
it has answered. A fork goes from FORKING to ACTIVE: it is its caller's from the start, and passes the queue.
Who is next in the queue is decided by `queueing`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from sandboxd.bounds import Bounds, Plan, Totals
from sandboxd.errors import InvalidRequest, QueueFull
from sandboxd.queueing import Claim, Queue

__all__ = ["Bounds", "Ledger", "Plan", "Totals"]

QUEUE_FULL_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Ledger:
    """The state of one pool. `new_id` names sandboxes; `bounds` may be changed between two plans."""

    bounds: Bounds
    new_id: Callable[[], str]
    starting: set[str] = field(default_factory=set)
    backing_off: set[str] = field(default_factory=set)
    resumable: OrderedDict[str, None] = field(default_factory=OrderedDict)
    warm: OrderedDict[str, None] = field(default_factory=OrderedDict)
    doubted: OrderedDict[str, None] = field(default_factory=OrderedDict)
    active: set[str] = field(default_factory=set)
    resetting: set[str] = field(default_factory=set)
    quarantined: OrderedDict[str, None] = field(default_factory=OrderedDict)
    forking: set[str] = field(default_factory=set)
    deleting: set[str] = field(default_factory=set)
    waiting: Queue = field(init=False)
    totals: Totals = field(default_factory=Totals)
    degraded: bool = False
    _next_ticket: int = 0

    def __post_init__(self) -> None:
        self.waiting = Queue(self.bounds.weights)

    @property
    def size(self) -> int:
        """Sandboxes that exist or are on their way, in any state."""
        ended = len(self.quarantined) + len(self.deleting)
        return self.starting_count + len(self.forking) + self.ready_count + len(self.active) + ended

    @property
    def ready_count(self) -> int:
        """Sandboxes that nobody holds, whether they may be granted now or are to answer first."""
        return len(self.warm) + len(self.doubted)

    @property
    def starting_count(self) -> int:
        """Sandboxes on their way, whether an attempt runs, the next one is awaited, or they are reset."""
        starting = len(self.starting) + len(self.backing_off) + len(self.resumable)
        return starting + len(self.resetting)

    @property
    def fork_limit(self) -> int:
        """How many of the starts at once may be forks: half, so that neither keeps the other waiting."""
        return max(1, self.bounds.start_limit // 2)

    @property
    def _slots(self) -> int:
        """How many more starts may be under way; negative after the limit was lowered."""
        limit = 1 if self.degraded else self.bounds.start_limit
        return limit - len(self.starting) - min(len(self.forking), self.fork_limit)

    @property
    def starts_full(self) -> bool:
        """True when no more starts may be under way before one of them ends."""
        return self._slots <= 0

    def rebound(self, bounds: Bounds) -> None:
        """Other bounds hold from now on. Tenants that wait keep their weight until they do not."""
        self.bounds = bounds
        self.waiting.reweigh(bounds.weights)

    def enqueue(self, claim: Claim | None = None) -> int:
        """Adds a waiter and returns its ticket. Raises QueueFull with the number that wait, and
        InvalidRequest where it wants more than the pool may ever have.
        """
        claim = claim or Claim()
        if claim.count > self.bounds.size_limit:
            raise self.too_large(claim)
        if len(self.waiting) >= self.bounds.waiting_limit:
            raise self.queue_full()
        self._next_ticket += 1
        self.waiting.add(self._next_ticket, claim)
        return self._next_ticket

    def displace(self, claim: Claim) -> int | None:
        """Makes room in a full queue for a waiter that goes before others: takes out whoever would be served
        last and returns its ticket. None where there is room, or the new one itself would be last.
        """
        if claim.count > self.bounds.size_limit or len(self.waiting) < self.bounds.waiting_limit:
            return None
        last = self.waiting.last_behind(claim)
        if last is not None:
            self.withdraw(last)
        return last

    def unmeetable(self) -> tuple[int, ...]:
        """Who wants more than the pool may have since its size was lowered."""
        limit = self.bounds.size_limit
        return tuple(ticket for ticket in self.waiting if self.waiting[ticket].count > limit)

    def queue_full(self) -> QueueFull:
        """What is said to whoever finds no place, or loses its own, in a full queue."""
        return QueueFull(
            f"{len(self.waiting)} callers wait already, as many as the pool lets wait, and go before",
            retry_after=QUEUE_FULL_RETRY_SECONDS,
            metadata={"waiting": str(len(self.waiting)), "position": str(len(self.waiting))},
        )

    def too_large(self, claim: Claim) -> InvalidRequest:
        """What is said to whoever could wait for ever."""
        return InvalidRequest(
            f"{claim.count} sandboxes at once are more than the pool's size_limit of"
            f" {self.bounds.size_limit}: ask for fewer, or raise it"
        )

    def withdraw(self, ticket: int) -> None:
        """Takes a waiter out of the queue that was not granted anything."""
        self.waiting.remove(ticket)

    def plan(self, *, may_fill: bool = True, room: int | None = None) -> Plan:
        """Decides, and counts as done, what to grant, resume and start.

        Waiters are granted in the order of the queue; behind a gang that does not fit yet nobody is. While
        `degraded` (the last start failed for good) one start at a time probes whether that has changed;
        with `may_fill` False it waits for a caller, too. Not more than `room` starts begin or go on.
        """
        grants = []
        while (head := self.waiting.head()) is not None and self.waiting[head].count <= len(self.warm):
            granted = self._grant(self.waiting[head].count)
            self.waiting.serve()
            grants.append((head, granted))
        evicted = self._evict() if self.quarantined else ()
        now = self._slots if room is None else min(self._slots, room)
        resumed = self._resume(now)
        started = self._start(now - len(resumed), may_fill=may_fill)
        return Plan(started, resumed, tuple(grants), self.held_back(may_fill=may_fill), evicted)

    def held_back(self, *, may_fill: bool) -> int:
        """How many more would begin now if they had room beside those of other pools."""
        left = self._slots
        return min(left, len(self.resumable) + self._missing(may_fill=may_fill)) if left > 0 else 0

    def grant_at_once(self, count: int) -> tuple[str, ...]:
        """WARM → ACTIVE, so many, where nobody waits and they are there; else none."""
        return () if self.waiting or count > len(self.warm) else self._grant(count)

    def _grant(self, count: int) -> tuple[str, ...]:
        granted = tuple(self.warm.popitem(last=False)[0] for _ in range(count))
        self.active.update(granted)
        self.totals.acquired += count
        return granted

    def _evict(self) -> tuple[str, ...]:
        """QUARANTINED → DELETING: the oldest beyond the limit, and those whose places are waited for."""
        coming = self.ready_count + self.starting_count + len(self.deleting)
        needed = self.waiting.sandboxes - coming - max(0, self.bounds.size_limit - self.size)
        count = max(len(self.quarantined) - self.bounds.quarantine_limit, needed)
        evicted = tuple(itertools.islice(self.quarantined, max(0, count)))
        for sandbox_id in evicted:
            self.release_quarantined(sandbox_id)
        return evicted

    def _resume(self, slots: int) -> tuple[str, ...]:
        resumed: list[str] = []
        while self.resumable and len(resumed) < slots:
            sandbox_id, _ = self.resumable.popitem(last=False)
            self.starting.add(sandbox_id)
            resumed.append(sandbox_id)
        return tuple(resumed)

    def _start(self, slots: int, *, may_fill: bool) -> tuple[str, ...]:
        wanted = self._missing(may_fill=may_fill) if slots > 0 else 0
        started = tuple(self.new_id() for _ in range(min(slots, wanted)))
        self.starting.update(started)
        return started

    def _missing(self, *, may_fill: bool, room: int = 0) -> int:
        """How many sandboxes should be on their way beside those that are, with more room than there is."""
        ready = self.bounds.warm_target if may_fill else 0
        wanted = ready + self.waiting.sandboxes - self.ready_count - self.starting_count
        return max(0, min(wanted, self.bounds.size_limit - self.size + room))

    def start_succeeded(self, sandbox_id: str) -> None:
        """STARTING → WARM."""
        self.starting.remove(sandbox_id)
        self.warm[sandbox_id] = None
        self.totals.started += 1
        self.degraded = False

    def attempt_failed(self, sandbox_id: str) -> None:
        """STARTING → BACKING OFF: frees the slot until the next attempt."""
        self.starting.remove(sandbox_id)
        self.backing_off.add(sandbox_id)
        self.totals.start_failures += 1

    def attempt_due(self, sandbox_id: str) -> None:
        """The back-off is over; the next plan that has a slot resumes the start."""
        self.backing_off.remove(sandbox_id)
        self.resumable[sandbox_id] = None

    def start_failed(self, sandbox_id: str, *, all_waiters: bool, keep: bool = False) -> tuple[int, ...]:
        """The start is given up; returns the tickets that must hear of it. STARTING → QUARANTINED if it is to
        be kept, else it is gone already.

        One start is made for one waiter, so the first in the queue hears of it, if any; all of them do when
        no repetition can succeed. A gang hears only of the second in a row: of many starts one may well fail.
        """
        self.starting.remove(sandbox_id)
        if keep:
            self.quarantined[sandbox_id] = None
        self.totals.start_failures += 1
        again, self.degraded = self.degraded, True
        head = self.waiting.head()
        told = tuple(self.waiting) if all_waiters else ()
        if not told and head is not None and (again or self.waiting[head].count == 1):
            told = (head,)
        for ticket in told:
            self.withdraw(ticket)
        return told

    def start_withdrawn(self, sandbox_id: str) -> None:
        """The start was cancelled by shutdown; nothing of the sandbox is left."""
        self.starting.discard(sandbox_id)
        self.backing_off.discard(sandbox_id)
        self.resumable.pop(sandbox_id, None)

    def adopt(self, sandbox_id: str, *, leased: bool) -> None:
        """A sandbox of an earlier daemon → WARM or ACTIVE; `totals` count it already."""
        if leased:
            self.active.add(sandbox_id)
        else:
            self.warm[sandbox_id] = None

    def fork(self, count: int) -> tuple[str, ...]:
        """New → FORKING. Until what gives way to them is gone (`making_room`) there are more than may be."""
        forks = tuple(self.new_id() for _ in range(count))
        self.forking.update(forks)
        return forks

    def forked(self, sandbox_id: str) -> None:
        """FORKING → ACTIVE."""
        self.forking.remove(sandbox_id)
        self.active.add(sandbox_id)
        self.totals.started += 1
        self.totals.acquired += 1

    def fork_failed(self, sandbox_id: str) -> None:
        """FORKING → DELETING: it may have been started."""
        self.forking.remove(sandbox_id)
        self.deleting.add(sandbox_id)

    def fork_withdrawn(self, sandbox_id: str) -> None:
        """FORKING → gone: its start was never begun."""
        self.forking.remove(sandbox_id)

    def release(self, sandbox_id: str) -> None:
        """ACTIVE → DELETING by its holder."""
        self._end(sandbox_id)
        self.totals.released += 1

    def may_reuse(self) -> bool:
        """Whether another sandbox would be wanted if one more lease ended."""
        return self._missing(may_fill=True, room=1) > 0

    def reuse(self, sandbox_id: str) -> str:
        """ACTIVE by its holder's release → gone; its place is that of a new one, RESETTING, whose name is
        returned: no word of the old holder can reach the next.
        """
        self.active.remove(sandbox_id)
        self.totals.released += 1
        name = self.new_id()
        self.resetting.add(name)
        return name

    def reset_done(self, sandbox_id: str) -> None:
        """RESETTING → WARM."""
        self.resetting.remove(sandbox_id)
        self.warm[sandbox_id] = None
        self.totals.reused += 1

    def reset_failed(self, sandbox_id: str, *, keep: bool) -> None:
        """RESETTING → QUARANTINED if it is to be kept, else DELETING."""
        self.resetting.remove(sandbox_id)
        if keep:
            self.quarantined[sandbox_id] = None
        else:
            self.deleting.add(sandbox_id)

    def expire(self, sandbox_id: str) -> None:
        """ACTIVE → DELETING because the lease ran out."""
        self._end(sandbox_id)
        self.totals.expired += 1

    def lose(self, sandbox_id: str) -> None:
        """ACTIVE, WARM or DOUBTED → DELETING because the sandbox died: one more lost, or unhealthy."""
        if sandbox_id in self.active:
            self._end(sandbox_id)
            self.totals.lost += 1
        else:
            self.retire(sandbox_id)
            self.totals.unhealthy += 1

    def retire(self, sandbox_id: str) -> None:
        """WARM or DOUBTED → DELETING: no longer wanted, or dead."""
        self._unready(sandbox_id)
        self.deleting.add(sandbox_id)

    def doubt(self, sandbox_id: str) -> None:
        """WARM → DOUBTED: it has not answered of late."""
        del self.warm[sandbox_id]
        self.doubted[sandbox_id] = None

    def trust(self, sandbox_id: str) -> None:
        """DOUBTED → WARM: it has answered."""
        del self.doubted[sandbox_id]
        self.warm[sandbox_id] = None

    def quarantine(self, sandbox_id: str) -> None:
        """WARM or DOUBTED → QUARANTINED: it did not answer, and is to be looked at."""
        self._unready(sandbox_id)
        self.quarantined[sandbox_id] = None
        self.totals.unhealthy += 1

    def release_quarantined(self, sandbox_id: str) -> None:
        """QUARANTINED → DELETING: its time is over, or its place is needed."""
        del self.quarantined[sandbox_id]
        self.deleting.add(sandbox_id)

    def surplus(self) -> tuple[str, ...]:
        """The ready sandboxes beyond the target and what the queue waits for: the doubted, the newest."""
        excess = self.ready_count - self.bounds.warm_target - self.waiting.sandboxes
        newest = itertools.chain(self.doubted, reversed(self.warm)) if excess > 0 else ()
        return tuple(itertools.islice(newest, max(0, excess)))

    def _unready(self, sandbox_id: str) -> None:
        del (self.doubted if sandbox_id in self.doubted else self.warm)[sandbox_id]

    def deleted(self, sandbox_id: str) -> None:
        """DELETING → gone."""
        self.deleting.remove(sandbox_id)

    def _end(self, sandbox_id: str) -> None:
        self.active.remove(sandbox_id)
        self.deleting.add(sandbox_id)

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold: a bug of the ledger, never bad luck."""
        on_their_way = (self.starting, self.backing_off, self.resumable, self.forking, self.resetting)
        states = (*on_their_way, self.warm, self.doubted, self.active, self.quarantined, self.deleting)
        totals = self.totals
        if len(set().union(*states)) != self.size:
            raise AssertionError(f"a sandbox is in two states at once: {self!r}")
        if totals.acquired != totals.released + totals.expired + totals.lost + len(self.active):
            raise AssertionError(f"acquired is not released + expired + lost + active: {self!r}")
        if len(self.waiting) > self.bounds.waiting_limit:
            raise AssertionError(f"more wait than the {self.bounds.waiting_limit} that may: {self!r}")
        self.waiting.check()

    def __repr__(self) -> str:
        return (
            f"<Ledger {len(self.starting)} starting, {len(self.backing_off) + len(self.resumable)} backing"
            f" off, {len(self.forking)} forking, {self.ready_count} warm, {len(self.active)} active,"
            f" {len(self.deleting)} deleting, {len(self.waiting)} waiting>"
        )
