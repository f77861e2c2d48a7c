"""Who waits in the queue of a pool: their deadlines, their positions, and what they hear.

The ledger decides who is next; this keeps the callers' futures beside it, and measures how fast it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sandboxd.clock import Clock
from sandboxd.errors import AcquireTimedOut, QueueFull, SandboxdError
from sandboxd.fleet import Fleet
from sandboxd.leases import Lease
from sandboxd.ledger import Ledger
from sandboxd.queueing import Claim
from sandboxd.rates import GrantRate
from sandboxd.sandbox import Sandbox
from sandboxd.types import QueuePosition

# How many positions are told in a second at most, to all callers together: 10,000 then hear every 10 s.
POSITIONS_PER_SECOND = 1000.0
# Whoever finds the queue full is told to come back when it would have been served, within these bounds.
RETRY_LEAST_SECONDS, RETRY_MOST_SECONDS = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Waiter:
    """Who waits for sandboxes, and what is to be written on the leases in the moment they are granted."""

    ticket: int
    claim: Claim
    lease: Lease
    granted: asyncio.Future[list[Sandbox]]
    since: float

    def sandboxes(self) -> list[Sandbox]:
        """What it was granted; nothing while it waits or when it was refused."""
        future = self.granted
        return future.result() if future.done() and not future.cancelled() and not future.exception() else []


@dataclass(frozen=True, slots=True)
class Watch:
    """How a waiter hears where it stands: at once, then every `interval` seconds, or less often where many
    watch. Awaiting `told` may take as long as it takes.
    """

    interval: float
    told: Callable[[QueuePosition], Awaitable[None]]


class Waiters:
    """Of one pool."""

    def __init__(self, pool: str, fleet: Fleet, ledger: Ledger, clock: Clock) -> None:
        self._pool = pool
        self._fleet = fleet
        self._ledger = ledger
        self._clock = clock
        self._rate = GrantRate()
        self._waiters: dict[int, Waiter] = {}
        self._watching = 0

    def join(self, lease: Lease, claim: Claim) -> Waiter:
        """Puts a caller into the queue; call `Fleet.pump` next. In a full queue whoever would be served last
        is refused, be it the new one. Raises QueueFull, InvalidRequest.
        """
        displaced = self._ledger.displace(claim)
        try:
            ticket = self._ledger.enqueue(claim)
        except QueueFull as error:
            raise self._with_delay(error) from None
        future: asyncio.Future[list[Sandbox]] = asyncio.get_running_loop().create_future()
        # Retrieved here, so that a failure whose caller has left is not reported as unhandled.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        waiter = self._waiters[ticket] = Waiter(ticket, claim, lease, future, self._clock.now())
        if displaced is not None:
            self.refused(displaced, self._with_delay(self._ledger.queue_full()))
        return waiter

    async def wait(self, waiter: Waiter, timeout: float | None, watch: Watch | None) -> None:
        """Returns when it was granted. When it raises, it waits no longer, but may have been granted.

        Raises AcquireTimedOut after `timeout` seconds, and what it was refused with.
        """
        position = QueuePosition(0, 0)
        self._watching += watch is not None
        # Not before: who is served at once has not waited.
        self._observe()
        try:
            if watch is not None:
                await self._watched(waiter, timeout, watch)
            elif timeout is None:
                await asyncio.shield(waiter.granted)
            else:
                # A task less for each that waits; what it is refused with is told below.
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(timeout):
                        await asyncio.shield(waiter.granted)
        finally:
            self._watching -= watch is not None
            if not waiter.granted.done():
                position = self.position(waiter)
                self._leave(waiter)
        if not waiter.granted.done():
            raise self._timed_out(timeout, position)
        waiter.granted.result()

    async def _watched(self, waiter: Waiter, timeout: float | None, watch: Watch) -> None:
        """Returns when it was granted or refused, or its time has passed; tells meanwhile where it stands."""
        timer = None if timeout is None else asyncio.ensure_future(self._clock.sleep(timeout))
        ends: set[asyncio.Future[Any]] = {waiter.granted, *((timer,) if timer else ())}
        try:
            while not any(end.done() for end in ends):
                await watch.told(self.position(waiter))
                pause = max(watch.interval, self._watching / POSITIONS_PER_SECOND)
                tick = asyncio.ensure_future(self._clock.sleep(pause))
                try:
                    await asyncio.wait(ends | {tick}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    tick.cancel()
        finally:
            if timer:
                timer.cancel()

    def position(self, waiter: Waiter) -> QueuePosition:
        """Where it stands. It must wait."""
        callers, sandboxes = self._ledger.waiting.before(waiter.ticket)
        return QueuePosition(callers, sandboxes, self._expected(sandboxes + waiter.claim.count))

    def expected_behind_all(self) -> float | None:
        """Seconds until a caller who came now would be served, after all who wait; None as `_expected`."""
        return self._expected(self._ledger.waiting.sandboxes + 1)

    def oldest_wait(self) -> float | None:
        """Seconds since the one that waits longest came; None where none waits."""
        first = next(iter(self._waiters.values()), None)
        return None if first is None else self._clock.now() - first.since

    def _expected(self, sandboxes: int) -> float | None:
        """Seconds until so many are granted, as fast as of late; None where nothing was measured."""
        rate = self._rate.per_second(self._clock.now())
        return None if rate is None else sandboxes / rate

    def granted(self, ticket: int, sandboxes: Sequence[Sandbox]) -> None:
        """The ledger's word that a waiter has all it wanted."""
        self._observe(len(sandboxes))
        self._waiters.pop(ticket).granted.set_result(list(sandboxes))

    def lease(self, ticket: int) -> Lease:
        """What a waiter wants to be written on its leases."""
        return self._waiters[ticket].lease

    def tenant(self, ticket: int) -> str:
        """On whose account a waiter waits."""
        return self._waiters[ticket].claim.tenant

    def refused(self, ticket: int, error: SandboxdError) -> None:
        """A waiter that the ledger no longer knows hears why."""
        self._observe()
        self._waiters.pop(ticket).granted.set_exception(error)

    def refuse(self, tickets: Sequence[int], why: Callable[[Claim], SandboxdError]) -> None:
        """Sends waiters away."""
        for ticket in tickets:
            self._ledger.withdraw(ticket)
            self.refused(ticket, why(self._waiters[ticket].claim))

    def _leave(self, waiter: Waiter) -> None:
        self._ledger.withdraw(waiter.ticket)
        del self._waiters[waiter.ticket]
        self._observe()
        # What had gathered for a gang at the head is now for those behind it.
        self._fleet.pump()

    def _observe(self, granted: int = 0) -> None:
        self._rate.observe(self._clock.now(), granted, waiting=bool(len(self._ledger.waiting)))

    def _with_delay(self, error: QueueFull) -> QueueFull:
        expected = self._expected(self._ledger.waiting.sandboxes)
        if expected is not None:
            error.retry_after = min(max(expected, RETRY_LEAST_SECONDS), RETRY_MOST_SECONDS)
        return error

    def _timed_out(self, timeout: float | None, position: QueuePosition) -> AcquireTimedOut:
        return AcquireTimedOut(
            f"no sandbox of pool {self._pool!r} became free within {timeout:.1f} s:"
            f" {position.callers_ahead} callers ahead, {self._ledger!r}",
            metadata={"position": str(position.callers_ahead)},
        )
