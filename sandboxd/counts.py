"""What a pool says of itself: its counts, how fast it is, and what a caller who comes now may expect."""

from __future__ import annotations

from collections import Counter

from sandboxd.fleet import Fleet
from sandboxd.types import PoolState, PoolStats, SandboxState, Share
from sandboxd.waiters import Waiters


def stats(fleet: Fleet, waiters: Waiters, now: float, stopping: str) -> PoolStats:
    """At this moment; `stopping` says why it takes no new work, and is empty while it does."""
    ledger, regulator = fleet.ledger, fleet.regulator
    totals = ledger.totals
    state, reason = pool_state(fleet, stopping)
    return PoolStats(
        warm_target=ledger.bounds.warm_target,
        size_limit=ledger.bounds.size_limit,
        starting=ledger.starting_count + len(ledger.forking),
        warm=ledger.ready_count,
        active=len(ledger.active),
        waiting=len(ledger.waiting),
        deleting=len(ledger.deleting),
        quarantined=len(ledger.quarantined),
        acquired_total=totals.acquired,
        released_total=totals.released,
        expired_total=totals.expired,
        lost_total=totals.lost,
        started_total=totals.started,
        start_failures_total=totals.start_failures,
        unhealthy_total=totals.unhealthy,
        reused_total=totals.reused,
        start_seconds=regulator.starts.median(),
        last_failure=regulator.health.reason,
        state=state,
        start_limit=regulator.slots.pace.limit,
        state_reason=reason,
        starts_per_second=regulator.starts.per_second(now),
        next_free_seconds=_next_free(fleet, waiters, now),
        oldest_wait_seconds=waiters.oldest_wait(),
        announced=regulator.sizing.announcements.begun,
    )


def shares(fleet: Fleet) -> list[Share]:
    """Of each tenant that holds or waits, by name. Forks count for the tenant of what they began as."""
    ledger, weights = fleet.ledger, fleet.ledger.bounds.weights
    active = Counter(fleet.sandboxes[name].tenant for name in ledger.active)
    waiting = ledger.waiting.by_tenant()
    return [
        Share(tenant, weights.get(tenant, 1), active[tenant], *waiting.get(tenant, (0, 0)))
        for tenant in sorted(active.keys() | waiting.keys())
    ]


def pool_state(fleet: Fleet, stopping: str) -> tuple[PoolState, str]:
    """How it fares, and why it does not fare well."""
    if stopping:
        return PoolState.DRAINING, stopping
    if fleet.availability.error is not None:
        return PoolState.UNAVAILABLE, fleet.availability.error.message
    if fleet.ledger.degraded:
        return PoolState.DEGRADED, fleet.regulator.health.reason
    return PoolState.OK, ""


def _next_free(fleet: Fleet, waiters: Waiters, now: float) -> float | None:
    """Seconds that a call which came now would wait; None where nothing was measured."""
    ledger = fleet.ledger
    if len(ledger.waiting):
        return waiters.expected_behind_all()
    if ledger.warm:
        return 0.0
    usual = fleet.regulator.starts.median()
    if usual is None:
        return None
    starting = (fleet.sandboxes[name] for name in ledger.starting)
    ready = [one.created + usual - now for one in starting if one.state is SandboxState.STARTING]
    return max(0.0, min(ready)) if ready else None
