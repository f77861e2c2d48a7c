"""What `sandboxd top` knows: the pools' numbers, tenants, the oldest leases, the last failures, runs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from sandboxd import overview
from sandboxd.client import Client
from sandboxd.clock import Clock
from sandboxd.overview import Rows, Sections
from sandboxd.replies import SandboxInfo
from sandboxd.runs import Run
from sandboxd.types import PoolStats

FAILURES_SHOWN = 5
LEASES_SHOWN = 5
# Leases are listed one by one, so less often than the pools' numbers come.
LEASES_SECONDS = 2.0


class Recent:
    """Asks only when the pools' numbers say that there is something new. `pool` is the one shown, or None."""

    def __init__(self, client: Client, pool: str | None, runs: Sequence[Run], clock: Clock) -> None:
        self._client, self._pool, self._runs, self._clock = client, pool, runs, clock
        self._tenants: Rows = {}
        self._failures: Rows = {}
        self._leases: Rows = {}
        self._failed_before: dict[str, int] = {}
        self._listed_at: float | None = None

    async def look(self, pools: Mapping[str, PoolStats]) -> Sections:
        """All that is known, as the live page has it. Raises as the client does."""
        await self._look_for_failures(pools)
        await self._look_for_tenants(pools)
        await self._look_for_leases(pools)
        for run in self._runs:
            await run.look()
        return {
            "pools": {name: overview.pool_row(stats) for name, stats in pools.items()},
            "tenants": self._tenants,
            "leases": self._leases,
            "failures": self._failures,
            "runs": {run.name: run.head() for run in self._runs},
        }

    async def _look_for_failures(self, pools: Mapping[str, PoolStats]) -> None:
        failed = {name: overview.failed_total(stats) for name, stats in pools.items()}
        if failed != self._failed_before:
            known = (await self._client.list_failures(self._pool))[: -FAILURES_SHOWN - 1 : -1]
            self._failures = {overview.failure_key(each): overview.failure_row(each) for each in known}
            self._failed_before = failed

    async def _look_for_tenants(self, pools: Mapping[str, PoolStats]) -> None:
        self._tenants = {}
        if any(stats.active or stats.waiting for stats in pools.values()):
            found = await self._client.list_tenants(self._pool)
            self._tenants = {
                overview.tenant_key(pool, share): overview.tenant_row(pool, share)
                for pool, shares in found.items()
                for share in shares
            }

    async def _look_for_leases(self, pools: Mapping[str, PoolStats]) -> None:
        now = self._clock.now()
        if not any(stats.active for stats in pools.values()):
            self._leases, self._listed_at = {}, None
        elif self._listed_at is None or now - self._listed_at >= LEASES_SECONDS:
            listed = [
                info async for info in self._client.list_sandboxes(self._pool) if info.state == "ACTIVE"
            ]
            oldest = heapq.nsmallest(LEASES_SHOWN, listed, key=_since)
            self._leases = {
                info.name: overview.lease_row(info.pool, info, info.leased, info.expires) for info in oldest
            }
            self._listed_at = now


def _since(info: SandboxInfo) -> tuple[float, str]:
    return overview.lease_since(info.leased, info.expires, info.ttl), info.name
