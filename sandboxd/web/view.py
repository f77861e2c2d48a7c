"""What the page shows of the pools at one moment: plain rows, each under a key of its own. Nothing waits.

Times are in seconds since 1970, durations in seconds. Bounded, however many sandboxes there are: the oldest
leases and the latest failures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from sandboxd import overview
from sandboxd.overview import Row, Rows
from sandboxd.pool import Pool
from sandboxd.pools import Pools
from sandboxd.sandbox import Sandbox
from sandboxd.types import SandboxState

LEASES_SHOWN = 200
FAILURES_SHOWN = 50


def pools_rows(pools: Pools) -> Rows:
    """The counts of each pool that is served."""
    return {name: overview.pool_row(pool.stats()) for name, pool in sorted(pools.by_name.items())}


def tenants_rows(pools: Pools) -> Rows:
    """Who holds and who waits, by pool and tenant."""
    rows: Rows = {}
    for pool in pools.by_name.values():
        for share in pool.shares():
            rows[overview.tenant_key(pool.name, share)] = overview.tenant_row(pool.name, share)
    return rows


def leases_rows(pools: Pools) -> Rows:
    """The leases that were granted first."""
    offset = pools.calendar_offset
    oldest = heapq.nsmallest(LEASES_SHOWN, _leased(pools), key=lambda found: (found[0], found[2].id))
    return {sandbox.id: lease_row(pool, sandbox, offset) for _, pool, sandbox in oldest}


def _leased(pools: Pools) -> Iterator[tuple[float, Pool, Sandbox]]:
    for pool in pools.every():
        for sandbox in pool.sandboxes():
            if sandbox.state is SandboxState.ACTIVE:
                yield _since(sandbox), pool, sandbox


def _since(sandbox: Sandbox) -> float:
    return overview.lease_since(sandbox.leased, sandbox.expiry, sandbox.ttl)


def lease_row(pool: Pool, sandbox: Sandbox, offset: float) -> Row:
    """One lease, with how often the sandbox was leased and how long its start took."""
    granted, expires = (None if when is None else when + offset for when in (sandbox.leased, sandbox.expiry))
    row = overview.lease_row(pool.name, sandbox, granted, expires)
    return {**row, "uses": sandbox.uses, "start_seconds": sandbox.start_seconds}


def failures_rows(pools: Pools) -> Rows:
    """The failures of late, of all pools together."""
    found = (failure for pool in pools.by_name.values() for failure in pool.failures()[-FAILURES_SHOWN:])
    latest = heapq.nlargest(FAILURES_SHOWN, found, key=lambda failure: failure.when)
    return {overview.failure_key(failure): overview.failure_row(failure) for failure in latest}
