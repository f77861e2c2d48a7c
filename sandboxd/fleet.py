"""The tasks of a pool: carries out what the ledger decides, and tells the ledger what came of it.

One task per start, one per destruction, one per living sandbox that waits for its death. All of them
live in one task group, which `run` closes; nothing else in the daemon creates or destroys a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from sandboxd.alarm import Alarm, Soon
from sandboxd.availability import Availability
from sandboxd.backends.base import Backend, Connection
from sandboxd.care import Care
from sandboxd.changes import Changes
from sandboxd.checkups import Checkups
from sandboxd.clock import Clock
from sandboxd.errors import SandboxdError, SandboxLost, StartFailed
from sandboxd.forking import Forks
from sandboxd.insisting import insist
from sandboxd.journal import Journal
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds, Ledger
from sandboxd.lifetime import Tasks, settle, told_by, told_later
from sandboxd.listener import Listener
from sandboxd.proof import Proof
from sandboxd.quarantine import Quarantine
from sandboxd.regulator import Regulation, Regulator
from sandboxd.resetting import Resets
from sandboxd.sandbox import Sandbox, lost
from sandboxd.starting import RetryPolicy, Starter, faults_fail_the_start
from sandboxd.types import SandboxState, Template

logger = logging.getLogger(__name__)


class Fleet:
    """The sandboxes of one pool and the tasks that start, watch and destroy them."""

    def __init__(
        self,
        name: str,
        *,
        backend: Backend,
        template: Template,
        retry: RetryPolicy,
        clock: Clock,
        journal: Journal,
    ) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.changes = Changes()
        self.availability = Availability(backend, clock)
        self.journal = journal
        self._made_from = template.digest
        self.describe = backend.describe
        self._name = name
        self._template = template
        self._backend = backend
        self._clock = clock
        self._retry = retry
        self._slots: dict[str, asyncio.Future[None]] = {}
        self._alarm = Alarm(clock, self.pump)
        # Another pool has left slots; its own plan is finished first.
        self._soon = Soon(self.pump)
        self._runs = False
        self._closing = asyncio.Event()

    def bind(self, bounds: Bounds, regulation: Regulation, care: Care, listener: Listener) -> Ledger:
        """Makes the ledger that this fleet carries out, and names who hears of grants."""
        self.regulator = Regulator(self._name, regulation, bounds, self._soon.set)
        self.ledger = Ledger(bounds, new_id=lambda: f"{self._name}-{uuid.uuid4().hex[:12]}")
        self._starter = self._new_starter()
        turns = self.regulator.turns(self._clock, lambda: self.ledger.fork_limit)
        self._forks = Forks(self._backend, self._retry, self._clock, turns)
        self.quarantine = Quarantine(self.ledger, care, self._clock, self.journal, self.destroy)
        proof = Proof(self._backend, self._template, self._starter, self._clock)
        self._resets = Resets(self, care, proof, ready=self._is_ready, new=self._new)
        self._checkups = Checkups(care, self._clock, self, failed=self._unhealthy)
        self._listener = listener
        return self.ledger

    def _new_starter(self) -> Starter:
        pace, template = self.regulator.slots.pace, self._template
        return Starter(self._backend, template, self._retry, self._clock, pace, on_prepared=self.pump)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Keeps the pool filled until the block ends, then destroys every sandbox and returns."""
        async with Tasks() as self._tasks:
            self._runs = True
            for sandbox in self.sandboxes.values():
                self._begin_to_watch(sandbox)
            asking = self._tasks.create_task(self._checkups.run(), name=f"checkups {self._name}")
            self.pump()
            try:
                yield self._tasks
            finally:
                asking.cancel()
                self._checkups.end()
                self._close()

    def _close(self) -> None:
        self._closing.set()
        self._alarm.cancel()
        self.regulator.end()
        for sandbox in list(self.sandboxes.values()):
            if sandbox.id in self.ledger.forking and sandbox.task:
                # Forks share one, which a second time would hit in its own cleaning up.
                if not sandbox.task.cancelling():
                    sandbox.task.cancel()
            elif sandbox.state is SandboxState.ACTIVE:
                self.ledger.release(sandbox.id)
                self._begin_to_destroy(sandbox)
            elif sandbox.state is SandboxState.QUARANTINED:
                self.ledger.release_quarantined(sandbox.id)
                self._begin_to_destroy(sandbox)
            else:
                self._drop_unleased(sandbox)
        self.journal.commit(self.ledger.totals)

    def _template_of(self, sandbox: Sandbox) -> Template:
        return sandbox.template or sandbox.origin or self._template

    def remake(self, template: Template, retry: RetryPolicy, care: Care) -> None:
        """Starts from this template from now on; what is ready or under way from another is replaced."""
        self._template, self._retry = template, retry
        before, self._starter = self._starter, self._new_starter()
        # Then those under way go on, and hold their slots.
        self._starter.is_prepared = before.is_prepared and template.digest == self._made_from
        self._checkups.care = self.quarantine.care = self._resets.care = care
        self._resets.proof = Proof(self._backend, template, self._starter, self._clock)
        if template.digest != self._made_from:
            self._made_from = template.digest
            for sandbox in list(self.sandboxes.values()):
                self._drop_unleased(sandbox)
            # What failed was the other template's.
            self.regulator.forget_failures()
            self.ledger.degraded = False
        self.pump()

    def _drop_unleased(self, sandbox: Sandbox) -> None:
        if sandbox.state is SandboxState.WARM:
            self.ledger.retire(sandbox.id)
            self._begin_to_destroy(sandbox)
        elif sandbox.state is SandboxState.RESETTING:
            self.ledger.reset_failed(sandbox.id, keep=False)
            self._begin_to_destroy(sandbox)
        elif sandbox.state is SandboxState.STARTING and sandbox.id not in self.ledger.forking:
            # Counted out here: a task that is cancelled before its first step never runs.
            if sandbox.task:
                sandbox.task.cancel()
            sandbox.state = SandboxState.DELETING
            self.ledger.start_withdrawn(sandbox.id)
            self._slots.pop(sandbox.id, None)
            del self.sandboxes[sandbox.id]

    def adopt(self, sandbox: Sandbox) -> None:
        """Takes over a sandbox of an earlier daemon, before `run`."""
        self.ledger.adopt(sandbox.id, leased=sandbox.state is SandboxState.ACTIVE)
        self.sandboxes[sandbox.id] = sandbox
        if sandbox.template:
            self._forks.count_in(sandbox.template)

    def pump(self) -> None:
        """Carries out the ledger's plan: call after anything that may change it. Nothing before `run`."""
        if not self._runs or self._closing.is_set():
            return
        self._checkups.doubt_overdue()
        self.regulator.held = self.availability.error is not None
        plan, again = self.regulator.plan(self.ledger, self._clock.now(), self._starter)
        if again is not None:
            self._alarm.set(again, self._tasks)
        for ticket, names in plan.grant:
            granted = [self.sandboxes[name] for name in names]
            for sandbox in granted:
                sandbox.state, sandbox.uses = SandboxState.ACTIVE, sandbox.uses + 1
                self._checkups.forget(sandbox)
            self._listener.granted(ticket, granted)
        for sandbox_id in plan.evict:
            self._begin_to_destroy(self.sandboxes[sandbox_id])
        self._checkups.ask_for_waiters(self._tasks)
        for sandbox_id in plan.resume:
            self._slots.pop(sandbox_id).set_result(None)
        for sandbox_id in plan.start:
            sandbox = self.sandboxes[sandbox_id] = self._new(sandbox_id, self._template, self._made_from)
            sandbox.task = self._tasks.create_task(self._start(sandbox), name=f"start {sandbox_id}")
        for sandbox_id in self.ledger.surplus():
            self.ledger.retire(sandbox_id)
            self._begin_to_destroy(self.sandboxes[sandbox_id])
        # Before anybody hears of it: those who wait run after this.
        self.journal.commit(self.ledger.totals)
        self.changes.tell()

    def _new(self, sandbox_id: str, origin: Template, made_from: str) -> Sandbox:
        return Sandbox(sandbox_id, self._clock.now(), origin=origin, made_from=made_from)

    def keep(self, sandbox: Sandbox) -> None:
        """Notes that it is ready, or what its lease says now; whoever calls this pumps or commits."""
        self.journal.keep(sandbox.entry())

    async def _start(self, sandbox: Sandbox) -> None:
        begin = self._clock.now()
        try:
            sandbox.connection = await self._create(sandbox)
        except StartFailed as error:
            if sandbox.id in self.sandboxes:
                self._start_failed(sandbox, error)
            return
        finally:
            if sandbox.unclean and sandbox.id not in self.sandboxes:
                self._destroy_uncounted(sandbox)
        if sandbox.id not in self.sandboxes:
            # Finished in the moment of its cancellation.
            self._destroy_uncounted(sandbox)
            return
        now = self._clock.now()
        sandbox.start_seconds = now - begin
        self.regulator.started(now, sandbox.start_seconds)
        self._is_ready(sandbox)
        self.ledger.start_succeeded(sandbox.id)
        self.pump()

    def fork(self, source: Sandbox, count: int, lease: Lease) -> tuple[list[Sandbox], asyncio.Future[None]]:
        """Begins to start sandboxes with the files of `source`, all or none. They are leased when the future
        is done, which else has the error. Raises PoolFull.
        """
        origin, made_from = source.origin or self._template, source.made_from
        forks = [self._new(name, origin, made_from) for name in self.ledger.fork(count)]
        done: asyncio.Future[None] = told_later()
        task = self._tasks.create_task(self._fork(source, forks, lease, done), name=f"fork {source.id}")
        task.add_done_callback(lambda _: self._fork_ended(forks, done))
        for fork in forks:
            self.sandboxes[fork.id], fork.task, fork.gang = fork, task, count
        self.changes.tell()
        return forks, done

    async def _fork(
        self, source: Sandbox, forks: list[Sandbox], lease: Lease, done: asyncio.Future[None]
    ) -> None:
        begin = self._clock.now()
        try:
            await self._forks.start_all(source.id, self._template_of(source), forks)
            if not self._closing.is_set():
                for fork in forks:
                    self.regulator.measured(self._clock.now(), self._clock.now() - begin)
                    fork.state, fork.uses = SandboxState.ACTIVE, 1
                    self._begin_to_watch(fork)
                    self.ledger.forked(fork.id)
                    self._listener.forked(fork, lease)
                self.journal.commit(self.ledger.totals)
                self.changes.tell()
                done.set_result(None)
        except SandboxdError as error:
            self.ledger.totals.start_failures += 1
            self.regulator.health.fork_failed(source.id, error.message)
            done.set_exception(error)
        finally:
            for fork in forks:
                if fork.id in self.ledger.forking:
                    self.ledger.fork_failed(fork.id)
                    fork.task = None
                    self._begin_to_destroy(fork)
            self._forks.prune_unused(self._tasks, self._insist)

    def _fork_ended(self, forks: list[Sandbox], done: asyncio.Future[None]) -> None:
        """Its task has ended; where it left something undone it was cancelled before its first step."""
        for fork in forks:
            if fork.id in self.ledger.forking:
                self.ledger.fork_withdrawn(fork.id)
                del self.sandboxes[fork.id]
        settle(done)
        self.pump()

    def snapshot(self, sandbox: Sandbox, image: str) -> tuple[asyncio.Task[None], asyncio.Future[int]]:
        """Begins to store a sandbox's files as an image; the future has the bytes copied, or what
        `Backend.snapshot` raises.
        """
        return told_by(self._tasks, self._snapshot(sandbox, image), f"snapshot {sandbox.id}")

    async def _snapshot(self, sandbox: Sandbox, image: str) -> int:
        template = self._template_of(sandbox)
        try:
            with self._forks.held(template):
                return await self._backend.snapshot(sandbox.id, template, image)
        finally:
            self._forks.prune_unused(self._tasks, self._insist)

    async def _insist(self, what: str, act: Callable[[], Awaitable[None]]) -> bool:
        return await insist(what, act, self._clock, self.availability, self._closing)

    async def _create(self, sandbox: Sandbox) -> Connection:
        async def between(pause: float) -> None:
            self.availability.suspect()
            self.ledger.attempt_failed(sandbox.id)
            self.pump()
            await self._clock.sleep(pause)
            self.ledger.attempt_due(sandbox.id)
            slot = self._slots[sandbox.id] = asyncio.get_running_loop().create_future()
            self.pump()
            await slot

        failed, keep = partial(self.quarantine.note, sandbox.id), partial(self.quarantine.offered, sandbox)
        with faults_fail_the_start(f"starting {sandbox.id}", known=StartFailed):
            connection = await self._starter.start(
                sandbox.id, between=between, failed=failed, keep=keep, left=sandbox.is_unclean
            )
            await self._resets.look_at_new(sandbox.id, connection)
            return connection

    def _start_failed(self, sandbox: Sandbox, error: StartFailed) -> None:
        self.availability.suspect()
        self._slots.pop(sandbox.id, None)
        kept = sandbox.connection is not None
        self.regulator.health.failed(self._clock.now(), error.message, error.metadata.get("log", ""))
        for ticket in self.ledger.start_failed(sandbox.id, all_waiters=not error.retryable, keep=kept):
            self._listener.refused(ticket, error)
        if kept:
            sandbox.task = None
            self.quarantine.hold(sandbox, self._tasks)
        else:
            del self.sandboxes[sandbox.id]
            if sandbox.unclean:
                self._destroy_uncounted(sandbox)
        self.pump()

    def _unhealthy(self, sandbox: Sandbox, error: SandboxdError) -> None:
        self.quarantine.take_unhealthy(sandbox, error, self._tasks)
        self._checkups.forget(sandbox)
        self.pump()

    def _begin_to_watch(self, sandbox: Sandbox) -> None:
        sandbox.task = self._tasks.create_task(self._watch(sandbox), name=f"watch {sandbox.id}")
        if sandbox.state is SandboxState.WARM:
            self._checkups.answered(sandbox)

    async def _watch(self, sandbox: Sandbox) -> None:
        why = await lost(sandbox)
        if sandbox.state not in (SandboxState.WARM, SandboxState.ACTIVE):
            return
        leased = sandbox.state is SandboxState.ACTIVE
        logger.warning("sandbox %s died while %s: %s", sandbox.id, sandbox.state.name.lower(), why)
        self.ledger.lose(sandbox.id)
        sandbox.task = None
        error = SandboxLost(f"sandbox {sandbox.id!r} died: {why}", metadata={"sandbox": sandbox.id})
        self.quarantine.note(sandbox.id, error)
        if leased:
            self._listener.died(sandbox, error)
        self.destroy(sandbox)

    def let_go(self, sandbox: Sandbox) -> None:
        """A holder's release: it is reset for another where that is allowed and wanted, else destroyed."""
        if self._closing.is_set() or not self._resets.may_begin(sandbox, self._made_from):
            self.ledger.release(sandbox.id)
            self.destroy(sandbox)
        else:
            self._resets.begin(sandbox, self._tasks)
            self.pump()

    def _is_ready(self, sandbox: Sandbox) -> None:
        """STARTING or RESETTING → WARM; call `pump` once the ledger knows."""
        sandbox.was, sandbox.state = "", SandboxState.WARM
        self._begin_to_watch(sandbox)
        self.keep(sandbox)

    def destroy(self, sandbox: Sandbox) -> None:
        """Begins to destroy a sandbox that the ledger already counts as deleting."""
        self._begin_to_destroy(sandbox)
        self.pump()

    def _destroy_uncounted(self, sandbox: Sandbox) -> None:
        """One whose start was counted out, but which is there, or may be."""
        self.sandboxes[sandbox.id] = sandbox
        self.ledger.deleting.add(sandbox.id)
        sandbox.task = None  # It is the one that says so.
        self._begin_to_destroy(sandbox)

    def _begin_to_destroy(self, sandbox: Sandbox) -> None:
        if sandbox.task:
            sandbox.task.cancel()
        sandbox.state = SandboxState.DELETING
        self._checkups.forget(sandbox)
        self.journal.forget(sandbox.id)
        sandbox.task = self._tasks.create_task(self._destroy(sandbox), name=f"destroy {sandbox.id}")

    async def _destroy(self, sandbox: Sandbox) -> None:
        if sandbox.connection:
            await sandbox.connection.close()
        for name in filter(None, (sandbox.was, sandbox.id)):
            await self._insist(f"destroying {name}", partial(self._backend.destroy, name))
        if sandbox.template:
            self._forks.count_out(sandbox.template)
            self._forks.prune_unused(self._tasks, self._insist)
        self.ledger.deleted(sandbox.id)
        del self.sandboxes[sandbox.id]
        self.pump()
