"""What the live page and `sandboxd top` show alike: plain rows, each under a key of its own.

The page is told by the daemon's own pools, `top` by a client; both make their rows here, so that they say the
same. Times are in seconds since 1970, durations in seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from sandboxd.types import PoolStats, Share

Row = dict[str, Any]
Rows = dict[str, Row]
Sections = dict[str, Rows]
"""Rows by section: `pools`, `tenants`, `leases`, `failures`, `runs`."""

LOG_CHARACTERS = 4096
NO_TENANT = "of an earlier daemon"


class Failed(Protocol):
    """Why a sandbox failed, as the daemon or as a client knows it."""

    @property
    def sandbox(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def when(self) -> float: ...
    @property
    def attempt(self) -> int: ...
    @property
    def log(self) -> str: ...


class Leased(Protocol):
    """What a lease's row says of its holder."""

    @property
    def tenant(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def ttl(self) -> float: ...


def failed_total(stats: PoolStats) -> int:
    """Starts that failed, sandboxes that did not answer, and leased ones that died."""
    return stats.start_failures_total + stats.unhealthy_total + stats.lost_total


def pool_row(stats: PoolStats) -> Row:
    """The counts of a pool."""
    return {**dataclasses.asdict(stats), "failed_total": failed_total(stats)}


def tenant_key(pool: str, share: Share) -> str:
    """Of the row of a tenant."""
    return f"{pool}/{share.tenant}"


def tenant_row(pool: str, share: Share) -> Row:
    """Who holds and who waits."""
    return {"pool": pool, **dataclasses.asdict(share), "name": share.tenant or NO_TENANT}


def lease_row(pool: str, lease: Leased, granted: float | None, expires: float | None) -> Row:
    """One lease. `exact` is false where its beginning is not known, but a later time is: its last renewal."""
    since = lease_since(granted, expires, lease.ttl)
    return {
        "pool": pool,
        "since": round(since, 3),
        "exact": granted is not None,
        "expires": None if expires is None else round(expires, 3),
        "tenant": lease.tenant,
        "labels": dict(lease.labels),
        "holder": " ".join(f"{key}={value}" for key, value in lease.labels.items()),
    }


def lease_since(granted: float | None, expires: float | None, ttl: float) -> float:
    """When a lease began; where another daemon granted it, when it was last renewed."""
    return granted if granted is not None else (expires or 0.0) - ttl


def failure_key(failure: Failed) -> str:
    """Of the row of a failure."""
    return f"{failure.sandbox}/{failure.attempt}/{failure.when:.6f}"


def failure_row(failure: Failed) -> Row:
    """Why one failed, with the last that it printed."""
    return {
        "sandbox": failure.sandbox,
        "pool": failure.sandbox.rpartition("-")[0],
        "phase": str(failure.phase),
        "cause": str(failure.cause),
        "message": failure.message,
        "when": failure.when,
        "attempt": failure.attempt,
        "log": failure.log[-LOG_CHARACTERS:],
    }
