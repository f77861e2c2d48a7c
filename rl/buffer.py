"""The bounded buffer of groups between the rollouts and the trainer: slots, finished groups, batches.

A slot is taken when a group is admitted and freed when the weights that it trained are live, or when
the group is dropped. Every change is a plain method; only `admitted` and `take` wait, on an event that
each change sets. What enters, in which order it leaves and what is given up decides a queue policy.

    admitted ─▶ claim ─▶ running ─▶ finish ─▶ ready ─▶ take ─▶ training ─▶ mark_trained ─▶ release
                            └───────── drop ◀──────────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rl.errors import Exhausted
from rl.staleness import Candidate, QueuePolicy, Standing
from rl.types import Group, Task


@dataclass(frozen=True, slots=True)
class Ready:
    """A finished group that carries a signal; `oldest_version` is that of its tokens."""

    ticket: int
    group: Group
    oldest_version: int


@dataclass(slots=True)
class _Running:
    """A group that is being played: `scored` of its attempts have a verdict; `end` ends it with those.

    Before it has `begun` no weights have sampled any of it, and `version` is that of its admission.
    """

    task: Task
    version: int
    end: Callable[[], None]
    begun: bool = False
    scored: int = 0
    ended: bool = False


def _play_on() -> None:
    """What ends a group that cannot be ended early."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch for one step, and finished groups that were too old to be in it or will be after it."""

    batch: list[Ready]
    stale: list[Ready]


class GroupBuffer:
    """Holds at most as many groups as the policy admits."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._tickets = itertools.count()
        self._running: dict[int, _Running] = {}
        self._ready: dict[int, Ready] = {}
        self._training: dict[int, Task] = {}
        self._trained: set[int] = set()
        self._evicted: list[Ready] = []
        """Dropped, and to be returned by the next `take` that returns: until then nobody knows of them."""
        self._dropped: Counter[str] = Counter()
        self._closed = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        early = f"{len(self._running)} running, {len(self._ready)} ready"
        late = f"{len(self._training)} training, {len(self._trained)} trained"
        return f"<GroupBuffer {early}, {late}{', closed' if self._closed else ''}>"

    @property
    def depth(self) -> int:
        """Finished groups that wait for the trainer."""
        return len(self._ready)

    @property
    def outstanding(self) -> int:
        """Groups between admission and live weights."""
        return len(self._running) + len(self._ready) + len(self._training) + len(self._trained)

    @property
    def bytes(self) -> int:
        """What the arrays of the finished groups take."""
        return sum(ready.group.bytes for ready in self._ready.values())

    @property
    def dropped(self) -> Counter[str]:
        return self._dropped

    def unsettled(self, *, training: bool = True) -> list[Task]:
        """Tasks neither trained nor dropped, in order of admission: what a resumed run must play again.

        Without those in `training` when the step under way has changed the weights already.
        """
        tasks = {ticket: running.task for ticket, running in self._running.items()}
        tasks |= {ready.ticket: ready.group.task for ready in (*self._ready.values(), *self._evicted)}
        tasks |= self._training if training else {}
        return [tasks[ticket] for ticket in sorted(tasks)]

    async def admitted(self) -> None:
        """Waits until another group may start."""
        while not self._policy.admit(self._standing()):
            await self._change()

    def claim(self, task: Task, version: int, end: Callable[[], None] = _play_on) -> int:
        """Takes a slot for a group that starts under weights `version`; returns its ticket.

        `end` is called at most once, when the group is to go on with what it has; it must not wait, and the
        group must then soon be finished or dropped.
        """
        if not self._policy.admit(self._standing()):
            raise RuntimeError(f"{self!r} is full: wait for `admitted` first")
        ticket = next(self._tickets)
        self._running[ticket] = _Running(task, version, end)
        return ticket

    def note_begun(self, ticket: int, version: int) -> None:
        """The first attempt of a group begins under weights `version`; nothing for the others."""
        running = self._running[ticket]
        if not running.begun:
            running.begun, running.version = True, version
            self._signal()

    def note_scored(self, ticket: int, count: int) -> None:
        """So many attempts of a running group have a verdict by now."""
        self._running[ticket].scored = count
        self._signal()

    def finish(self, ticket: int, group: Group) -> None:
        """The group is played and carries a signal."""
        running = self._running.pop(ticket)
        oldest = group.oldest_version
        self._ready[ticket] = Ready(ticket, group, running.version if oldest is None else oldest)
        self._signal()

    def drop(self, ticket: int, reason: str) -> None:
        """Frees the slot of a running, ready or training group; counted under `reason`."""
        for holder in (self._running, self._ready, self._training):
            if ticket in holder:
                del holder[ticket]
                self._dropped[reason] += 1
                self._signal()
                return
        raise KeyError(f"no group has ticket {ticket}")

    async def take(self, version: int) -> Taken:
        """Waits for the batch that the policy selects for training on weights `version`.

        Whatever the policy evicts on the way is dropped and returned beside it, and so is what will be
        too old once the step is done. Raises Exhausted once the buffer is closed and no batch can form any
        more.
        """
        while True:
            self._evict(version, version)
            chosen = self._policy.select(self._standing(version), version)
            if chosen is not None:
                batch = self._begin_training(chosen)
                self._evict(version, version + 1)
                stale, self._evicted = self._evicted, []
                return Taken(batch, stale)
            if self._closed and not self._running:
                raise Exhausted(f"the tasks have run out with {self!r}")
            await self._change()

    def mark_trained(self, tickets: Iterable[int]) -> None:
        """The weights hold what these groups taught; their slots stay taken until those are live."""
        for ticket in tickets:
            del self._training[ticket]
            self._trained.add(ticket)

    def release(self) -> None:
        """The newest weights are live: the slots of all trained groups are free."""
        self._trained.clear()
        self._signal()

    def close(self) -> None:
        """No group will be claimed any more."""
        self._closed = True
        self._signal()

    def _evict(self, live: int, version: int) -> None:
        """Ends what may not be trained on weights `version` while `live` ones sample."""
        for ticket in self._policy.evict(self._standing(live), version):
            if ticket in self._ready:
                self._evicted.append(self._ready[ticket])
                self.drop(ticket, "stale")
            elif not self._running[ticket].ended:
                self._running[ticket].ended = True
                self._running[ticket].end()

    def _begin_training(self, tickets: Iterable[int]) -> list[Ready]:
        batch = [self._ready.pop(ticket) for ticket in tickets]
        self._training |= {ready.ticket: ready.group.task for ready in batch}
        return batch

    def _standing(self, live: int = 0) -> Standing:
        """What has not begun can begin under `live` weights at the earliest."""
        return Standing(
            [
                Candidate(ticket, each.version if each.begun else max(each.version, live), each.scored)
                for ticket, each in self._running.items()
            ],
            [Candidate(ticket, each.oldest_version) for ticket, each in self._ready.items()],
            len(self._training) + len(self._trained),
        )

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
