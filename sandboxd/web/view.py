"""What the page shows of the pools at one moment: plain rows, each under a key of its own. Nothing waits.

Times are in seconds since 1970, durations in seconds. Bounded, however many sandboxes there are: the oldest
leases and the latest failures.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from typing import Any

from sandboxd.care import Failure
from sandboxd.pool import Pool
from sandboxd.pools import Pools
from sandboxd.sandbox import Sandbox
from sandboxd.types import SandboxState

LEASES_SHOWN = 200
FAILURES_SHOWN = 50
LOG_CHARACTERS = 4096

Row = dict[str, Any]
Rows = dict[str, Row]


def pools_rows(pools: Pools) -> Rows:
    """The counts of each pool that is served."""
    return {name: dataclasses.asdict(pool.stats()) for name, pool in sorted(pools.by_name.items())}


def tenants_rows(pools: Pools) -> Rows:
    """Who holds and who waits, by pool and tenant."""
    rows: Rows = {}
    for pool in pools.by_name.values():
        for share in pool.shares():
            rows[f"{pool.name}/{share.tenant}"] = {"pool": pool.name, **dataclasses.asdict(share)}
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
    """When the lease began; where another daemon granted it, when it was last renewed."""
    return sandbox.leased if sandbox.leased is not None else (sandbox.expiry or 0.0) - sandbox.ttl


def lease_row(pool: Pool, sandbox: Sandbox, offset: float) -> Row:
    """One lease. `exact` is false where its beginning is not known, but a later time is."""
    return {
        "pool": pool.name,
        "since": round(_since(sandbox) + offset, 3),
        "exact": sandbox.leased is not None,
        "expires": None if sandbox.expiry is None else round(sandbox.expiry + offset, 3),
        "tenant": sandbox.tenant,
        "labels": sandbox.labels,
        "uses": sandbox.uses,
        "start_seconds": sandbox.start_seconds,
    }


def failures_rows(pools: Pools) -> Rows:
    """The failures of late, of all pools together."""
    found = (
        (failure.when, name, failure)
        for name, pool in pools.by_name.items()
        for failure in pool.failures()[-FAILURES_SHOWN:]
    )
    latest = heapq.nlargest(FAILURES_SHOWN, found, key=lambda each: each[0])
    return {
        f"{failure.sandbox}/{failure.attempt}/{failure.when:.6f}": failure_row(name, failure)
        for _, name, failure in latest
    }


def failure_row(pool: str, failure: Failure) -> Row:
    """Why one failed, with the last that it printed."""
    return {"pool": pool, **dataclasses.asdict(failure), "log": failure.log[-LOG_CHARACTERS:]}
