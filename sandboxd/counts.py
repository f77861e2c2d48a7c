"""What a pool says of itself: the ledger's counts, and what its starts were measured to be."""

from __future__ import annotations

from sandboxd.ledger import Ledger
from sandboxd.regulator import Regulator
from sandboxd.types import PoolState, PoolStats


def stats(ledger: Ledger, regulator: Regulator) -> PoolStats:
    """Counts and totals at this moment."""
    totals = ledger.totals
    return PoolStats(
        warm_target=ledger.bounds.warm_target,
        size_limit=ledger.bounds.size_limit,
        starting=ledger.starting_count + len(ledger.forking),
        warm=len(ledger.warm),
        active=len(ledger.active),
        waiting=len(ledger.waiting),
        deleting=len(ledger.deleting),
        acquired_total=totals.acquired,
        released_total=totals.released,
        expired_total=totals.expired,
        lost_total=totals.lost,
        started_total=totals.started,
        start_failures_total=totals.start_failures,
        start_seconds=regulator.start_seconds,
        last_failure=regulator.health.reason,
        state=PoolState.DEGRADED if ledger.degraded else PoolState.OK,
        start_limit=regulator.slots.pace.limit,
    )
