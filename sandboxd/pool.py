"""A pool of equal sandboxes: kept warm, leased in the order of the queue, destroyed after use.

What ends something (`release`, `drain`) is synchronous: it marks the sandbox and returns, since a gRPC
handler may be cut off at any await. The tasks of the `Fleet` do the work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

from sandboxd.announcements import Announcement, Preparation
from sandboxd.availability import Availability
from sandboxd.backends.base import Backend, Connection
from sandboxd.care import Failure
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.counts import pool_state, shares, stats
from sandboxd.endings import again
from sandboxd.errors import Draining, Internal, SandboxdError, SandboxLost, SandboxNotFound
from sandboxd.fleet import Fleet
from sandboxd.inspecting import Inspection, inspect
from sandboxd.journal import Journal, MemoryJournal, Past
from sandboxd.leases import Lease
from sandboxd.leasing import Leasing
from sandboxd.pool_options import PoolOptions
from sandboxd.queueing import Claim
from sandboxd.sandbox import Sandbox
from sandboxd.telemetry.recorder import ACQUIRE_WAIT, current, link, step, timed
from sandboxd.types import PoolState, PoolStats, SandboxState, Share, Template
from sandboxd.waiters import Waiters, Watch

__all__ = ["Pool", "PoolOptions"]


class Pool:
    """One pool. Use `async with pool.run():`; nothing of it is left when that block ends."""

    def __init__(
        self,
        name: str,
        *,
        backend: Backend,
        template: Template,
        options: PoolOptions,
        clock: Clock | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.name = name
        self.template = template
        self._options = options
        self._clock = clock or MonotonicClock()
        self._journal = journal or MemoryJournal()
        self._fleet = Fleet(
            name,
            backend=backend,
            template=template,
            retry=options.retry,
            clock=self._clock,
            journal=self._journal,
        )
        self._ledger = self._fleet.bind(options.bounds, options.regulation, options.care, self)
        self._leasing = Leasing(self._fleet, self._clock, self._journal)
        self._waiters = Waiters(name, self._fleet, self._ledger, self._clock)
        self._refusal: SandboxdError | None = None
        self.changes = self._fleet.changes
        self.heard: Callable[[str, Connection], Connection] | None = None
        """Puts itself around the connections that callers are given."""

    def depend_on(self, availability: Availability) -> None:
        """Starts nothing, before `run` already, while its backend is not there."""
        self._fleet.availability = availability
        availability.changes.forward(self._backend_changed)

    def _backend_changed(self) -> None:
        """Those who have waited long enough for it hear so; the others go on when it is back."""
        refusal = self._fleet.availability.refusal
        if refusal is not None:
            self._waiters.refuse(tuple(self._ledger.waiting), lambda _: again(refusal))
        self._fleet.pump()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Pool]:
        """Fills the pool and serves it until the block ends, then destroys all it has.

        Order at the end: refuse new work and fail the waiters, cancel the starts (each cleans up after
        itself), destroy every sandbox, return when the last is gone.
        """
        async with self._fleet.run() as tasks:
            self._leasing.begin_grace()
            expiry = tasks.create_task(self._leasing.expire(), name=f"{self.name}: lease expiry")
            try:
                yield self
            finally:
                self.drain()
                expiry.cancel()
                self._fleet.availability.changes.drop(self._backend_changed)

    def restore(self, past: Past, connections: Mapping[str, Connection]) -> None:
        """Goes on, before `run`, where an earlier daemon was killed: with the sandboxes that are still there,
        by the `connections` to them, and with the losses of the others.
        """
        self._leasing.restore(past, connections)

    async def acquire(
        self, lease: Lease | None = None, claim: Claim | None = None, *, timeout: float | None = None
    ) -> Sandbox:
        """Leases one sandbox; else as `acquire_all`."""
        return (await self.acquire_all(lease or Lease(), claim or Claim(), timeout=timeout))[0]

    async def acquire_all(
        self, lease: Lease, claim: Claim, *, timeout: float | None = None, watch: Watch | None = None
    ) -> list[Sandbox]:
        """Leases as many sandboxes as are claimed, all or none, waiting up to `timeout` seconds.

        A `request_id` seen before gives the sandboxes that it gave then. Raises QueueFull,
        AcquireTimedOut, StartFailed, Draining, InvalidRequest where the pool can never have so many, and what
        the earlier call's sandboxes have met since.
        """
        self._check_open()

        async def acquire() -> list[str]:
            refusal = self._fleet.availability.refusal
            if refusal is not None and len(self._ledger.warm) < claim.count:
                raise again(refusal)
            if granted := self._fleet.grant_at_once(claim.count):
                self._begin(granted, lease, claim.tenant)
                return await self._handed(self._fleet.leased(len(granted)), lambda: granted)
            waiter = self._waiters.join(lease, claim)
            self._fleet.regulator.sizing.arrived(self._clock.now(), claim.count)
            self._fleet.awaited(current.get())
            return await self._handed(self._waiters.wait(waiter, timeout, watch), waiter.sandboxes)

        async def queue() -> list[str]:
            told = {"sandboxd.pool": self.name}
            with step("queue wait", {**told, "sandboxd.count": claim.count, "sandboxd.tenant": claim.tenant}):
                with timed(ACQUIRE_WAIT, self._clock.now, told):
                    given = await acquire()
                for sandbox_id in given:
                    link(self._fleet.sandboxes[sandbox_id].span)
                return given

        ids = await self._leasing.requests.once(lease.request_id, claim.count, queue)
        return [self.get(sandbox_id) for sandbox_id in ids]

    async def _handed(self, wait: Awaitable[None], granted: Callable[[], Sequence[Sandbox]]) -> list[str]:
        """The names of what was granted, once the wait for it is over."""
        try:
            await wait
            # One may have died since.
            return [self.get(sandbox.id).id for sandbox in granted()]
        except BaseException:
            # Nobody comes for what was granted. It is destroyed like used ones: simpler than sure.
            self._release_all(granted())
            raise

    async def fork(self, sandbox_id: str, count: int, lease: Lease) -> list[Sandbox]:
        """Leases `count` new sandboxes whose files are as this one's are now; all or none.

        A `request_id` is as with `acquire_all`. Raises PoolFull, Draining, StartFailed, InvalidRequest where
        the backend cannot, and as `get`.
        """
        self._check_open()

        async def fork() -> list[str]:
            parent = self.get(sandbox_id)
            forks, done = self._fleet.fork(parent, count, lease)
            for each in forks:
                each.tenant = parent.tenant
            try:
                await asyncio.shield(done)
                return [self.get(each.id).id for each in forks]
            except BaseException:
                done.add_done_callback(lambda _: self._release_all(forks))
                raise

        return [self.get(each) for each in await self._leasing.requests.once(lease.request_id, count, fork)]

    def _release_all(self, sandboxes: Iterable[Sandbox]) -> None:
        for sandbox in sandboxes:
            self.release(sandbox.id)

    async def snapshot(self, sandbox_id: str, image: str) -> int:
        """Stores the sandbox's files as an image; returns the bytes copied. Raises as `fork`."""
        task, done = self._fleet.snapshot(self.get(sandbox_id), image)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            task.cancel()
            raise

    def granted(self, ticket: int, sandboxes: Sequence[Sandbox]) -> None:
        """The fleet's word that a waiter's sandboxes are there."""
        self._begin(sandboxes, self._waiters.lease(ticket), self._waiters.tenant(ticket))
        self._waiters.granted(ticket, sandboxes)

    def _begin(self, sandboxes: Sequence[Sandbox], lease: Lease, tenant: str) -> None:
        for sandbox in sandboxes:
            sandbox.gang, sandbox.tenant = len(sandboxes), tenant
            self._leasing.begin(sandbox, lease, self._options.default_ttl)

    def forked(self, sandbox: Sandbox, lease: Lease) -> None:
        """The fleet's word that a fork runs."""
        self._leasing.begin(sandbox, lease, self._options.default_ttl)

    def refused(self, ticket: int, error: SandboxdError) -> None:
        """The fleet's word that a waiter's start failed for good."""
        self._waiters.refused(ticket, error)

    def died(self, sandbox: Sandbox, error: SandboxLost) -> None:
        """The fleet's word that a leased sandbox ended by itself."""
        self._leasing.ended(sandbox, error)

    def renew(self, sandbox_id: str, ttl: float | None = None) -> Sandbox:
        """Moves the lease's end to now plus `ttl` (the last one when None). Raises as `get`."""
        sandbox = self.get(sandbox_id)
        self._leasing.renew(sandbox, ttl)
        return sandbox

    def release(self, sandbox_id: str) -> None:
        """Ends the lease; the sandbox is destroyed afterwards, or reset under a new name. Idempotent."""
        sandbox = self._fleet.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.state is not SandboxState.ACTIVE:
            return
        self._leasing.released(sandbox)
        self._fleet.let_go(sandbox)

    def release_request(self, request_id: str) -> None:
        """Ends the leases that a request was given; one that still waits is given nothing. Idempotent."""
        self._leasing.requests.whenever(request_id, self.release)

    def get(self, sandbox_id: str) -> Sandbox:
        """The leased sandbox of this name. Raises LeaseExpired, SandboxLost or SandboxNotFound."""
        sandbox = self._fleet.sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.state is SandboxState.ACTIVE:
            return sandbox
        unknown = SandboxNotFound(f"no leased sandbox {sandbox_id!r} in pool {self.name!r}")
        raise self._leasing.endings.of(sandbox_id) or unknown

    async def inspect(self, sandbox_id: str) -> Inspection:
        """See `inspecting.inspect`."""
        unknown = SandboxNotFound(f"no sandbox {sandbox_id!r} in pool {self.name!r}")
        return await inspect(self._fleet, sandbox_id, self._leasing.endings.of(sandbox_id) or unknown)

    def failures(self) -> list[Failure]:
        """The last hundred failures of sandboxes, the oldest first."""
        return self._fleet.quarantine.failures.all()

    def connection(self, sandbox_id: str) -> Connection:
        """The way into a leased sandbox. Raises as `get`."""
        connection = self.get(sandbox_id).connection
        if connection is None:
            raise Internal(f"sandbox {sandbox_id!r} is leased but has no connection")
        return connection if self.heard is None else self.heard(sandbox_id, connection)

    def sandboxes(self) -> list[Sandbox]:
        """All that exist, oldest first."""
        return list(self._fleet.sandboxes.values())

    def resize(self, *, warm_target: int | None = None, size_limit: int | None = None) -> None:
        """Changes what the pool may have, within what the host carries; surplus warm ones are destroyed."""
        bounds = self._ledger.bounds
        if warm_target is not None:
            self._fleet.regulator.sizing.floor = warm_target
        bounds.size_limit = bounds.size_limit if size_limit is None else self._options.carried(size_limit)
        self._waiters.refuse(self._ledger.unmeetable(), self._ledger.too_large)
        self._fleet.pump()

    def announce(self, announcement_id: str, count: int, within: float, grace: float) -> Preparation:
        """So many will be wanted in `within` seconds, and are kept for `grace` seconds more.

        The same id again changes what was announced; a count of 0 withdraws it. Raises InvalidRequest,
        Draining.
        """
        self._check_open()
        now = self._clock.now()
        one = Announcement(announcement_id, count, now + within, now + within + grace)
        preparation = self._fleet.regulator.announce(now, one, self._ledger.bounds)
        self._fleet.pump()
        return preparation

    def drain(self, why: SandboxdError | None = None) -> None:
        """Refuses new work and fails whoever waits, with `why`; leases go on, nothing else is kept.

        Without `why` the daemon is shutting down.
        """
        refusal = self._refusal = why or Draining("the daemon is shutting down")
        self._waiters.refuse(tuple(self._ledger.waiting), lambda _: again(refusal))
        self._fleet.regulator.sizing.stop()
        self._fleet.pump()

    @property
    def idle(self) -> bool:
        """True when nobody holds a sandbox of it or is about to."""
        return not (self._ledger.active or self._ledger.forking)

    @property
    def quiet(self) -> bool:
        """True when nobody waits and no sandbox is on its way up or down."""
        ledger = self._ledger
        return not (len(ledger.waiting) or ledger.starting_count or ledger.forking or ledger.deleting)

    def reclaim(self) -> int:
        """Ends all leases, whose holders hear SANDBOX_LOST; returns how many there were."""
        leased = [sandbox for sandbox in self.sandboxes() if sandbox.state is SandboxState.ACTIVE]
        for sandbox in leased:
            self._ledger.lose(sandbox.id)
            message = f"sandbox {sandbox.id!r} was reclaimed: the daemon is shutting down"
            self._leasing.ended(sandbox, SandboxLost(message, metadata={"sandbox": sandbox.id}))
            self._fleet.destroy(sandbox)
        return len(leased)

    def reconfigure(self, template: Template, options: PoolOptions) -> None:
        """Goes on with other settings: bounds hold at once, the template for new sandboxes; those that are
        ready are replaced. Leases stay as they are. A pool that was drained takes work again.
        """
        self._refusal = None
        self.template, self._options = template, options
        self._ledger.rebound(options.bounds)
        self._fleet.regulator.rebound(options.regulation, options.bounds)
        self._waiters.refuse(self._ledger.unmeetable(), self._ledger.too_large)
        self._fleet.remake(template, options.retry, options.care)

    def _check_open(self) -> None:
        """Raises what `drain` was given."""
        if self._refusal is not None:
            raise again(self._refusal)

    def stats(self) -> PoolStats:
        """Counts and totals at this moment."""
        return stats(self._fleet, self._waiters, self._clock.now(), self._stopping)

    def shares(self) -> list[Share]:
        """Of each tenant that holds or waits at this moment."""
        return shares(self._fleet)

    @property
    def state(self) -> PoolState:
        """As in `stats`."""
        return pool_state(self._fleet, self._stopping)[0]

    @property
    def _stopping(self) -> str:
        return self._refusal.message if self._refusal else ""

    def check(self) -> None:
        """Raises AssertionError where the books do not close."""
        self._ledger.check()

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} {self._ledger!r}>"
