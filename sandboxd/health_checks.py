"""What `grpc.health.v1` says of each pool and each backend, beside the server and its services.

Names are `pools/{pool}` and `backends/{kind}`. A pool is SERVING while its backend answers and it takes work.
"""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2

from sandboxd.changes import paced
from sandboxd.types import PoolState
from sandboxd.upkeep import Upkeep

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
# A pool changes a thousand times a second in a burst, and hardly ever how it fares.
INTERVAL_SECONDS, HEARTBEAT_SECONDS = 0.05, 3600.0


class HealthChecks:
    """Keeps the answers of one server up to date."""

    def __init__(self, servicer: health.aio.HealthServicer, upkeep: Upkeep) -> None:
        self._servicer = servicer
        self._upkeep = upkeep
        self._told: dict[str, int] = {}

    async def run(self) -> None:
        """Tells whatever changes, until the pools are closed."""
        pools = self._upkeep.pools
        async for _ in paced(pools.changes, pools.clock, INTERVAL_SECONDS, HEARTBEAT_SECONDS):
            await self.tell()

    async def tell(self) -> None:
        """Says how it is now; what is gone is unknown again."""
        now = self._now()
        gone = dict.fromkeys(self._told.keys() - now.keys(), UNKNOWN)
        for name, status in (now | gone).items():
            if self._told.get(name) != status:
                await self._servicer.set(name, status)
        self._told = now

    def _now(self) -> dict[str, int]:
        now: dict[str, int] = {
            f"backends/{kind}": NOT_SERVING if one.availability.error else SERVING
            for kind, one in self._upkeep.backends
        }
        for pool in self._upkeep.pools.every():
            takes_work = pool.state not in (PoolState.UNAVAILABLE, PoolState.DRAINING)
            # One that ends comes after one of the same name that has taken its place.
            now.setdefault(f"pools/{pool.name}", SERVING if takes_work else NOT_SERVING)
        return now
