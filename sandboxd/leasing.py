"""The leases of a pool: who holds which sandbox until when, how each ended, and what a restart keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from sandboxd.alarm import until
from sandboxd.backends.base import Connection
from sandboxd.clock import Clock
from sandboxd.endings import Endings
from sandboxd.errors import LeaseExpired, SandboxLost
from sandboxd.fleet import Fleet
from sandboxd.given import Requests
from sandboxd.journal import Ending, Entry, Journal, Past
from sandboxd.leases import Lease, LeaseTable
from sandboxd.sandbox import Sandbox

# Who could not renew because no daemon ran may do so for this long after the next has begun.
RENEWAL_GRACE_SECONDS = 10.0


class Leasing:
    """Of one pool. It notes in the journal, and commits only what `restore` and `renew` change."""

    def __init__(self, fleet: Fleet, clock: Clock, journal: Journal) -> None:
        self.requests = Requests()
        self.endings = Endings()
        self._fleet = fleet
        self._clock = clock
        self._journal = journal
        self._table = LeaseTable()
        self._nudge = asyncio.Event()

    def restore(self, past: Past, connections: Mapping[str, Connection]) -> None:
        """See `Pool.restore`."""
        ledger = self._fleet.ledger
        ledger.totals = past.totals
        for ending in past.endings:
            self.endings.remember(ending)
        for entry in past.entries:
            if entry.request_id and entry.expiry is not None:
                self.requests.restore(entry.request_id, entry.gang, entry.id)
            connection = connections.get(entry.id)
            if connection is not None:
                self._adopt(entry, connection)
                continue
            self._journal.forget(entry.id)
            if entry.expiry is not None:
                ledger.totals.lost += 1
                message = f"sandbox {entry.id!r} died while no daemon ran"
                self.ended(Sandbox(entry.id, entry.created), SandboxLost(message))
        self.requests.forget_ended(self._is_leased)
        self._journal.commit(ledger.totals)

    def _adopt(self, entry: Entry, connection: Connection) -> None:
        sandbox = Sandbox.adopted(entry, connection, self._fleet.template)
        self._fleet.adopt(sandbox)
        if sandbox.expiry is not None:
            self._expire_at(sandbox, sandbox.expiry)

    def begin_grace(self) -> None:
        """Of the leases that were taken over: until now nobody could renew them."""
        for sandbox in self._fleet.sandboxes.values():
            if sandbox.expiry is not None:
                grace = self._clock.now() + min(sandbox.ttl, RENEWAL_GRACE_SECONDS)
                self._expire_at(sandbox, max(sandbox.expiry, grace))

    def begin(self, sandbox: Sandbox, lease: Lease, default_ttl: float) -> None:
        """The sandbox is somebody's from now on, for `default_ttl` seconds where the lease does not say."""
        sandbox.labels, sandbox.request_id = lease.labels, lease.request_id
        sandbox.leased = self._clock.now()
        self._set_expiry(sandbox, lease.ttl or default_ttl)
        self._fleet.keep(sandbox)

    def renew(self, sandbox: Sandbox, ttl: float | None) -> None:
        """See `Pool.renew`."""
        self._set_expiry(sandbox, ttl or sandbox.ttl)
        self._fleet.keep(sandbox)
        self._journal.commit(self._fleet.ledger.totals)

    def ended(self, sandbox: Sandbox, why: LeaseExpired | SandboxLost) -> None:
        """The sandbox is its holder's no more, who hears `why` when he asks for it."""
        self._drop(sandbox)
        ending = Ending(sandbox.id, why.reason, why.message, why.metadata)
        self.endings.remember(ending)
        self._journal.ended(ending)

    def released(self, sandbox: Sandbox) -> None:
        """Its holder has given it back, and hears SANDBOX_NOT_FOUND from now on."""
        self._drop(sandbox)
        self.endings.released(sandbox.id)

    def _drop(self, sandbox: Sandbox) -> None:
        self._table.drop(sandbox.id)
        self.requests.forget_ended(self._is_leased, sandbox.request_id)

    async def expire(self) -> None:
        """Ends leases that run out, for ever: sleeps until the next does, or one that ends sooner begins."""
        while True:
            for sandbox_id in self._table.expire(self._clock.now()):
                sandbox = self._fleet.sandboxes[sandbox_id]
                self._fleet.ledger.expire(sandbox_id)
                message = f"the lease of sandbox {sandbox_id!r} ran out after {sandbox.ttl:g} s"
                self.ended(sandbox, LeaseExpired(message))
                self._fleet.destroy(sandbox)
            self._nudge.clear()
            await until(self._table.next_expiry(), self._clock, self._nudge.wait())

    def _set_expiry(self, sandbox: Sandbox, ttl: float) -> None:
        sandbox.ttl = ttl
        self._expire_at(sandbox, self._clock.now() + ttl)

    def _expire_at(self, sandbox: Sandbox, expiry: float) -> None:
        sandbox.expiry = expiry
        self._table.put(sandbox.id, sandbox.expiry)
        if self._table.next_expiry() == sandbox.expiry:
            self._nudge.set()

    def _is_leased(self, sandbox_id: str) -> bool:
        return self._table.expiry(sandbox_id) is not None
