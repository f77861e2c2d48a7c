"""The forks and snapshots of a pool that are under way: tasks that copy the files of a leased sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from sandboxd.backends.base import Backend
from sandboxd.changes import Changes
from sandboxd.clock import Clock
from sandboxd.errors import SandboxdError
from sandboxd.forking import Forks
from sandboxd.journal import Journal
from sandboxd.leases import Lease
from sandboxd.ledger import Ledger
from sandboxd.lifetime import settle, told_by, told_later
from sandboxd.listener import Listener
from sandboxd.regulator import Regulator
from sandboxd.sandbox import Sandbox
from sandboxd.types import SandboxState, Template


class Owner(Protocol):
    """The fleet, as far as forks and snapshots know it."""

    sandboxes: dict[str, Sandbox]
    template: Template
    changes: Changes
    journal: Journal
    closing: asyncio.Event
    ledger: Ledger
    regulator: Regulator
    listener: Listener

    def pump(self) -> None: ...

    def make_room(self, count: int) -> list[asyncio.Task[None]]: ...

    def template_of(self, sandbox: Sandbox) -> Template: ...

    def new(self, sandbox_id: str, origin: Template, made_from: str) -> Sandbox: ...

    def begin_to_watch(self, sandbox: Sandbox) -> None: ...

    def begin_to_destroy(self, sandbox: Sandbox) -> None: ...

    async def insist(self, what: str, act: Callable[[], Awaitable[None]]) -> bool: ...


class Branching:
    """Of one pool, whose copies `forks` counts."""

    def __init__(self, owner: Owner, backend: Backend, forks: Forks, clock: Clock) -> None:
        self._owner = owner
        self._backend = backend
        self._forks = forks
        self._clock = clock

    def fork(
        self, source: Sandbox, count: int, lease: Lease, tasks: asyncio.TaskGroup
    ) -> tuple[list[Sandbox], asyncio.Future[None]]:
        """See `Fleet.fork`."""
        owner = self._owner
        leaving = owner.make_room(count)
        origin, made_from = source.origin or owner.template, source.made_from
        forks = [owner.new(name, origin, made_from) for name in owner.ledger.fork(count)]
        done: asyncio.Future[None] = told_later()
        work = self._fork(source, forks, lease, done, leaving, tasks)
        task = tasks.create_task(work, name=f"fork {source.id}")
        task.add_done_callback(lambda _: self._fork_ended(forks, done))
        for fork in forks:
            owner.sandboxes[fork.id], fork.task, fork.gang = fork, task, count
        owner.changes.tell()
        return forks, done

    async def _fork(
        self,
        source: Sandbox,
        forks: list[Sandbox],
        lease: Lease,
        done: asyncio.Future[None],
        leaving: Collection[asyncio.Task[None]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        owner, begin = self._owner, self._clock.now()
        try:
            await self._forks.start_all(source.id, owner.template_of(source), forks, leaving)
            if not owner.closing.is_set():
                for fork in forks:
                    owner.regulator.measured(self._clock.now(), self._clock.now() - begin)
                    fork.state, fork.uses = SandboxState.ACTIVE, 1
                    owner.begin_to_watch(fork)
                    owner.ledger.forked(fork.id)
                    owner.listener.forked(fork, lease)
                owner.journal.commit(owner.ledger.totals)
                owner.changes.tell()
                done.set_result(None)
        except SandboxdError as error:
            owner.ledger.totals.start_failures += 1
            owner.regulator.health.fork_failed(source.id, error.message)
            done.set_exception(error)
        finally:
            for fork in forks:
                if fork.id in owner.ledger.forking:
                    owner.ledger.fork_failed(fork.id)
                    fork.task = None
                    owner.begin_to_destroy(fork)
            self._forks.prune_unused(tasks, owner.insist)

    def _fork_ended(self, forks: list[Sandbox], done: asyncio.Future[None]) -> None:
        """Its task has ended; where it left something undone it was cancelled before its first step."""
        owner = self._owner
        for fork in forks:
            if fork.id in owner.ledger.forking:
                owner.ledger.fork_withdrawn(fork.id)
                del owner.sandboxes[fork.id]
        settle(done)
        owner.pump()

    def snapshot(
        self, sandbox: Sandbox, image: str, tasks: asyncio.TaskGroup
    ) -> tuple[asyncio.Task[None], asyncio.Future[int]]:
        """See `Fleet.snapshot`."""
        return told_by(tasks, self._snapshot(sandbox, image, tasks), f"snapshot {sandbox.id}")

    async def _snapshot(self, sandbox: Sandbox, image: str, tasks: asyncio.TaskGroup) -> int:
        template = self._owner.template_of(sandbox)
        try:
            with self._forks.held(template):
                return await self._backend.snapshot(sandbox.id, template, image)
        finally:
            self._forks.prune_unused(tasks, self._owner.insist)
