"""What stands below the pools in `sandboxd top` on a terminal: the last failures, and the oldest leases."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from sandboxd.client import Client
from sandboxd.inspection_replies import SandboxFailure
from sandboxd.replies import SandboxInfo
from sandboxd.types import PoolStats

FAILURES_SHOWN = 5
LEASES_SHOWN = 5
# Leases are listed one by one, so less often than the pools' numbers come.
LEASES_SECONDS = 2.0


def failed_total(stats: PoolStats) -> int:
    """Starts that failed, sandboxes that did not answer, and leased ones that died."""
    return stats.start_failures_total + stats.unhealthy_total + stats.lost_total


class Recent:
    """Asks only when the pools' numbers say that there is something new. `pool` is the one shown, or None."""

    def __init__(self, client: Client, pool: str | None) -> None:
        self._client, self._pool = client, pool
        self._failures: list[SandboxFailure] = []
        self._leases: list[SandboxInfo] = []
        self._failed_before: dict[str, int] = {}
        self._listed_at = 0.0

    async def look(self, pools: Mapping[str, PoolStats]) -> None:
        """Raises as the client does."""
        failed = {name: failed_total(stats) for name, stats in pools.items()}
        if failed != self._failed_before:
            self._failures = (await self._client.list_failures(self._pool))[-FAILURES_SHOWN:]
            self._failed_before = failed
        if not any(stats.active for stats in pools.values()):
            self._leases = []
        elif time.monotonic() - self._listed_at >= LEASES_SECONDS:
            listed = [
                info async for info in self._client.list_sandboxes(self._pool) if info.state == "ACTIVE"
            ]
            self._leases = heapq.nsmallest(LEASES_SHOWN, listed, key=lambda info: info.created)
            self._listed_at = time.monotonic()

    def tables(self) -> Iterator[Table]:
        """None where there is nothing to show."""
        now = time.time()
        if self._failures:
            table = Table("FAILED", "AGO", "PHASE", "CAUSE", "BECAUSE", box=None)
            for failure in reversed(self._failures):
                words = (failure.phase, failure.cause, failure.message)
                table.add_row(failure.sandbox, f"{now - failure.when:.0f} s", *map(Text, words))
            yield table
        if self._leases:
            table = Table("LEASED", "AGE", "ENDS IN", "HOLDER", box=None)
            for info in self._leases:
                ends = "-" if info.expires is None else f"{info.expires - now:.0f} s"
                holder = " ".join(f"{key}={value}" for key, value in info.labels.items()) or "-"
                table.add_row(info.name, f"{now - info.created:.0f} s", ends, Text(holder))
            yield table
