"""The bounded buffer of groups between the rollouts and the trainer: slots, finished groups, batches.

A slot is taken when a group is admitted and freed when the weights that it trained are live, or when
the group is dropped. Every change is a plain method; only `admitted` and `take` wait, on an event that
each change sets.

    admitted ─▶ claim ─▶ running ─▶ finish ─▶ ready ─▶ take ─▶ training ─▶ mark_trained ─▶ release
                            └───────── drop ◀──────────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rl.errors import Exhausted
from rl.staleness import Candidate, StalenessPolicy
from rl.types import Group, Task


@dataclass(frozen=True, slots=True)
class Ready:
    """A finished group that carries a signal; `oldest_version` is that of its tokens."""

    ticket: int
    group: Group
    oldest_version: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch for one step, and what was too old to be in it."""

    batch: list[Ready]
    stale: list[Ready]


class GroupBuffer:
    """Holds at most as many groups as the policy admits."""

    def __init__(self, policy: StalenessPolicy) -> None:
        self._policy = policy
        self._tickets = itertools.count()
        self._running: dict[int, tuple[Task, int]] = {}
        self._ready: dict[int, Ready] = {}
        self._training: dict[int, Task] = {}
        self._trained: set[int] = set()
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
    def dropped(self) -> Counter[str]:
        return self._dropped

    def unsettled(self, *, training: bool = True) -> list[Task]:
        """Tasks neither trained nor dropped, in order of admission: what a resumed run must play again.

        Without those in `training` when the step under way has changed the weights already.
        """
        tasks = {ticket: task for ticket, (task, _) in self._running.items()}
        tasks |= {ticket: ready.group.task for ticket, ready in self._ready.items()}
        tasks |= self._training if training else {}
        return [tasks[ticket] for ticket in sorted(tasks)]

    async def admitted(self) -> None:
        """Waits until another group may start."""
        while not self._policy.admit(self.outstanding):
            await self._change()

    def claim(self, task: Task, version: int) -> int:
        """Takes a slot for a group that starts under weights `version`; returns its ticket."""
        if not self._policy.admit(self.outstanding):
            raise RuntimeError(f"{self!r} is full: wait for `admitted` first")
        ticket = next(self._tickets)
        self._running[ticket] = (task, version)
        return ticket

    def finish(self, ticket: int, group: Group) -> None:
        """The group is played and carries a signal."""
        _, claimed_version = self._running.pop(ticket)
        oldest = group.oldest_version
        self._ready[ticket] = Ready(ticket, group, claimed_version if oldest is None else oldest)
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

        Whatever has become too old by then is dropped on the way and returned beside it. Raises
        Exhausted once the buffer is closed and no batch can form any more.
        """
        stale: list[Ready] = []
        while True:
            stale += self._evict(version)
            chosen = self._policy.select(self._candidates(), self._running_candidates(), version)
            if chosen is not None:
                return Taken(self._begin_training(chosen), stale)
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

    def _evict(self, version: int) -> list[Ready]:
        stale = [self._ready[ticket] for ticket in self._policy.evict(self._candidates(), version)]
        for ready in stale:
            self.drop(ready.ticket, "stale")
        return stale

    def _begin_training(self, tickets: Iterable[int]) -> list[Ready]:
        batch = [self._ready.pop(ticket) for ticket in tickets]
        self._training |= {ready.ticket: ready.group.task for ready in batch}
        return batch

    def _candidates(self) -> list[Candidate]:
        return [Candidate(ready.ticket, ready.oldest_version) for ready in self._ready.values()]

    def _running_candidates(self) -> list[Candidate]:
        return [Candidate(ticket, version) for ticket, (_, version) in self._running.items()]

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
