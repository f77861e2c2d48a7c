"""The tasks of a pool: carries out what the ledger decides, and tells the ledger what came of it.

One task per start (`starts`), one per destruction, one per living sandbox that waits for its death. All of
them live in one task group, which `run` closes; nothing else in the daemon creates or destroys a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from sandboxd.alarm import Alarm, Lull, Soon, Together
from sandboxd.availability import Availability
from sandboxd.backends.base import Backend
from sandboxd.branching import Branching
from sandboxd.care import Care
from sandboxd.changes import Changes
from sandboxd.checkups import Checkups
from sandboxd.clock import Clock
from sandboxd.errors import SandboxdError, SandboxLost
from sandboxd.forking import Forks
from sandboxd.insisting import insist
from sandboxd.journal import Journal
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds, Ledger
from sandboxd.lifetime import Tasks
from sandboxd.listener import Listener
from sandboxd.making_room import giving_way
from sandboxd.proof import Proof
from sandboxd.quarantine import Quarantine
from sandboxd.regulator import Regulation, Regulator
from sandboxd.resetting import Resets
from sandboxd.sandbox import Sandbox, lost
from sandboxd.starting import RetryPolicy, Starter
from sandboxd.starts import Starts
from sandboxd.types import SandboxState, Template

logger = logging.getLogger(__name__)

# A plan that nobody waits for is made when nothing has asked for one for so long, at the latest after the
# second, and soon where less than this part of what is kept ready is left.
LULL_SECONDS, LONGEST_SECONDS, LEAST_SHARE = 0.002, 0.5, 0.25
# So many leases that are granted within `Regulation.apart` are a burst: whoever asks for one after the other
# waits for no commit but his own.
CROWD = 4


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
        self.template = template
        self._backend = backend
        self._clock = clock
        self._retry = retry
        self._alarm = Alarm(clock, self.pump)
        self._lull = Lull(self.pump, LULL_SECONDS, LONGEST_SECONDS)
        self._runs = self._full = False
        self.closing = asyncio.Event()

    def bind(self, bounds: Bounds, regulation: Regulation, care: Care, listener: Listener) -> Ledger:
        """Makes the ledger that this fleet carries out, and names who hears of grants."""
        # Not at once: another pool that has left slots finishes its own plan first. And many starts may end
        # together, as many leases may begin: each plan and each commit costs as much as what it is for.
        self.pump_soon = Soon(self.pump, regulation.apart).set
        self._committing = Together(self._write, regulation.apart, CROWD)
        self._commit = self._committing.now
        self.regulator = Regulator(self._name, regulation, bounds, self.pump_soon)
        self.ledger = Ledger(bounds, new_id=lambda: f"{self._name}-{os.urandom(6).hex()}")
        starter = self._new_starter()
        turns = self.regulator.turns(self._clock, lambda: self.ledger.fork_limit)
        self._forks = Forks(self._backend, self._retry, self._clock, turns)
        self._branching = Branching(self, self._backend, self._forks, self._clock)
        self.quarantine = Quarantine(self.ledger, care, self._clock, self.journal, self.destroy)
        proof = Proof(self._backend, self.template, starter, self._clock)
        self._resets = Resets(self, care, proof, ready=self.is_ready, new=self.new)
        self._starts = Starts(self, starter, self._clock, self._resets.look_at_new)
        self._checkups = Checkups(care, self._clock, self, failed=self._unhealthy)
        self.listener = listener
        return self.ledger

    def _new_starter(self) -> Starter:
        pace, template = self.regulator.slots.pace, self.template
        return Starter(self._backend, template, self._retry, self._clock, pace, on_prepared=self.pump)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Keeps the pool filled until the block ends, then destroys every sandbox and returns."""
        async with Tasks() as self._tasks:
            self._runs = True
            for sandbox in self.sandboxes.values():
                self.begin_to_watch(sandbox)
            asking = self._tasks.create_task(self._checkups.run(), name=f"checkups {self._name}")
            self.pump()
            try:
                yield self._tasks
            finally:
                asking.cancel()
                self._checkups.end()
                self._close()

    def _close(self) -> None:
        self.closing.set()
        self._alarm.cancel()
        self._lull.cancel()
        self.regulator.end()
        for sandbox in list(self.sandboxes.values()):
            if sandbox.id in self.ledger.forking and sandbox.task:
                # Forks share one, which a second time would hit in its own cleaning up.
                if not sandbox.task.cancelling():
                    sandbox.task.cancel()
            elif sandbox.state is SandboxState.ACTIVE:
                self.ledger.release(sandbox.id)
                self.begin_to_destroy(sandbox)
            elif sandbox.state is SandboxState.QUARANTINED:
                self.ledger.release_quarantined(sandbox.id)
                self.begin_to_destroy(sandbox)
            else:
                self._drop_unleased(sandbox)
        self.journal.commit(self.ledger.totals)

    def template_of(self, sandbox: Sandbox) -> Template:
        """What it was made from."""
        return sandbox.template or sandbox.origin or self.template

    def remake(self, template: Template, retry: RetryPolicy, care: Care) -> None:
        """Starts from this template from now on; what is ready or under way from another is replaced."""
        self.template, self._retry = template, retry
        before, starter = self._starts.starter, self._new_starter()
        # Then those under way go on, and hold their slots.
        starter.is_prepared = before.is_prepared and template.digest == self._made_from
        self._starts.starter = starter
        self._checkups.care = self.quarantine.care = self._resets.care = care
        self._resets.proof = Proof(self._backend, template, starter, self._clock)
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
            self.begin_to_destroy(sandbox)
        elif sandbox.state is SandboxState.RESETTING:
            self.ledger.reset_failed(sandbox.id, keep=False)
            self.begin_to_destroy(sandbox)
        elif sandbox.state is SandboxState.STARTING and sandbox.id not in self.ledger.forking:
            self._starts.withdraw(sandbox)

    def make_room(self, count: int) -> list[asyncio.Task[None]]:
        """Ends what gives way to so many forks; they fit when the tasks that are returned have ended. Raises
        PoolFull.
        """
        leaving = [self.sandboxes[name] for name in giving_way(self.ledger, count)]
        ending = [each.task for each in leaving if each.state is SandboxState.STARTING]
        for sandbox in leaving:
            if sandbox.state is SandboxState.QUARANTINED:
                self.ledger.release_quarantined(sandbox.id)
                self.begin_to_destroy(sandbox)
            else:
                self._drop_unleased(sandbox)
        if self.ledger.size + count > self.ledger.bounds.size_limit:
            ending += [self.sandboxes[name].task for name in self.ledger.deleting]
        return [task for task in ending if task is not None]

    def adopt(self, sandbox: Sandbox) -> None:
        """Takes over a sandbox of an earlier daemon, before `run`."""
        self.ledger.adopt(sandbox.id, leased=sandbox.state is SandboxState.ACTIVE)
        self.sandboxes[sandbox.id] = sandbox
        if sandbox.template:
            self._forks.count_in(sandbox.template)

    def pump(self, cause: object = None) -> None:
        """Carries out the ledger's plan: call after anything that may change it. Nothing before `run`.

        `cause` is the span of the caller whom it is for, if there is one.
        """
        if not self._runs or self.closing.is_set():
            return
        self._lull.cancel()
        self._checkups.doubt_overdue()
        self.regulator.held = self.availability.error is not None
        plan, again = self.regulator.plan(self.ledger, self._clock.now(), self._starts.starter)
        self._full = plan.held_back > 0 or self.ledger.starts_full
        if again is not None:
            self._alarm.set(again, self._tasks)
        for ticket, names in plan.grant:
            self.listener.granted(ticket, self._granted(names))
        for sandbox_id in plan.evict:
            self.begin_to_destroy(self.sandboxes[sandbox_id])
        self._checkups.ask_for_waiters(self._tasks)
        for sandbox_id in plan.resume:
            self._starts.resume(sandbox_id)
        for sandbox_id in plan.start:
            sandbox = self.sandboxes[sandbox_id] = self.new(sandbox_id, self.template, self._made_from)
            self._starts.begin(sandbox, self._tasks, cause)
        for sandbox_id in self.ledger.surplus():
            self.ledger.retire(sandbox_id)
            self.begin_to_destroy(self.sandboxes[sandbox_id])
        # Before anybody hears of it: those who wait run after this.
        self._commit()

    def _granted(self, names: tuple[str, ...]) -> list[Sandbox]:
        granted = [self.sandboxes[name] for name in names]
        for sandbox in granted:
            sandbox.state, sandbox.uses = SandboxState.ACTIVE, sandbox.uses + 1
            self._checkups.forget(sandbox)
        return granted

    def grant_at_once(self, count: int) -> list[Sandbox]:
        """So many sandboxes where nobody waits and they are ready, else none; call `leased` next."""
        if not self._runs or self.closing.is_set():
            return []
        self._checkups.doubt_overdue()
        return self._granted(self.ledger.grant_at_once(count))

    def leased(self, count: int) -> asyncio.Future[None]:
        """So many that were granted at once are somebody's; others are to take their place.

        Nobody may hear of it before the future is done: then it is in the journal.
        """
        self.regulator.sizing.arrived(self._clock.now(), count)
        self._pump_later()
        return self._committing.done()

    def awaited(self, cause: object) -> None:
        """Somebody waits from now on. `cause` is the caller's span, if there is one."""
        ledger = self.ledger
        if self._full and not (ledger.warm or ledger.doubted or ledger.quarantined):
            # Nothing can be given or make room, and the end of a start brings the next.
            self.regulator.awaited(ledger, self._clock.now(), self._starts.starter)
        else:
            self.pump(cause)

    def _pump_later(self) -> None:
        """For what nobody waits for: a plan costs as much as a grant, and starts take from the same host.

        None where the last one could begin no more starts: the end of one that is under way brings the next.
        """
        if self._full:
            return
        if self.ledger.waiting or len(self.ledger.warm) < LEAST_SHARE * self.ledger.bounds.warm_target:
            self.pump_soon()
        else:
            self._lull.set()

    def _write(self) -> None:
        self.journal.commit(self.ledger.totals)
        self.changes.tell()

    def new(self, sandbox_id: str, origin: Template, made_from: str) -> Sandbox:
        """What is known of one that is about to be started."""
        return Sandbox(sandbox_id, self._clock.now(), origin=origin, made_from=made_from)

    def keep(self, sandbox: Sandbox) -> None:
        """Notes that it is ready, or what its lease says now; whoever calls this pumps or commits."""
        self.journal.keep(sandbox.entry())

    def fork(self, source: Sandbox, count: int, lease: Lease) -> tuple[list[Sandbox], asyncio.Future[None]]:
        """Begins to start sandboxes with the files of `source`, all or none. They are leased when the future
        is done, which else has the error. Raises PoolFull.
        """
        return self._branching.fork(source, count, lease, self._tasks)

    def snapshot(self, sandbox: Sandbox, image: str) -> tuple[asyncio.Task[None], asyncio.Future[int]]:
        """Begins to store a sandbox's files as an image; the future has the bytes copied, or what
        `Backend.snapshot` raises.
        """
        return self._branching.snapshot(sandbox, image, self._tasks)

    async def insist(self, what: str, act: Callable[[], Awaitable[None]]) -> bool:
        """See `insisting.insist`."""
        return await insist(what, act, self._clock, self.availability, self.closing)

    def _unhealthy(self, sandbox: Sandbox, error: SandboxdError) -> None:
        self.quarantine.take_unhealthy(sandbox, error, self._tasks)
        self._checkups.forget(sandbox)
        self.pump()

    def begin_to_watch(self, sandbox: Sandbox) -> None:
        """It is ready, or leased: from now on its death is noticed."""
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
            self.listener.died(sandbox, error)
        self.destroy(sandbox)

    def let_go(self, sandbox: Sandbox) -> None:
        """A holder's release: it is reset for another where that is allowed and wanted, else destroyed."""
        if self.closing.is_set() or not self._resets.may_begin(sandbox, self._made_from):
            self.ledger.release(sandbox.id)
            self.begin_to_destroy(sandbox)
            self._commit()
            self._pump_later()
        else:
            self._resets.begin(sandbox, self._tasks)
            self.pump()

    def is_ready(self, sandbox: Sandbox) -> None:
        """STARTING or RESETTING → WARM; call `pump` once the ledger knows."""
        sandbox.was, sandbox.state = "", SandboxState.WARM
        self.begin_to_watch(sandbox)
        self.keep(sandbox)

    def destroy(self, sandbox: Sandbox) -> None:
        """Begins to destroy a sandbox that the ledger already counts as deleting."""
        self.begin_to_destroy(sandbox)
        self.pump()

    def destroy_uncounted(self, sandbox: Sandbox) -> None:
        """One whose start was counted out, but which is there, or may be."""
        self.sandboxes[sandbox.id] = sandbox
        self.ledger.deleting.add(sandbox.id)
        sandbox.task = None  # It is the one that says so.
        self.begin_to_destroy(sandbox)

    def begin_to_destroy(self, sandbox: Sandbox) -> None:
        """As `destroy`, for who pumps afterwards."""
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
            await self.insist(f"destroying {name}", partial(self._backend.destroy, name))
        if sandbox.template:
            self._forks.count_out(sandbox.template)
            self._forks.prune_unused(self._tasks, self.insist)
        self.ledger.deleted(sandbox.id)
        del self.sandboxes[sandbox.id]
        self._pump_later()
