"""The gRPC skin of what concerns whole pools: their counts, told once or as they change, and their bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from sandboxd import pool_wire
from sandboxd.gate import Gate
from sandboxd.pools import Pools
from sandboxd.service import Context, streaming, unary
from sandboxd.types import Reloaded
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc
from sandboxd.wire import timestamp


class PoolService(pb_grpc.PoolServiceServicer):
    """The pools' counts and bounds. Calls begin through `gate`."""

    def __init__(self, pools: Pools, reload: Callable[[], Awaitable[Reloaded]], gate: Gate) -> None:
        self.gate = gate
        self._pools = pools
        self._reload = reload

    @unary
    async def GetPool(self, request: pb.GetPoolRequest, context: Context) -> pb.Pool:
        pool = self._pools.named(request.name)
        return pool_wire.pool(pool.name, pool.stats())

    @unary
    async def ListPools(self, request: pb.ListPoolsRequest, context: Context) -> pb.ListPoolsResponse:
        pools = sorted(self._pools.by_name.values(), key=lambda pool: pool.name)
        return pb.ListPoolsResponse(pools=[pool_wire.pool(pool.name, pool.stats()) for pool in pools])

    @unary
    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> pb.ListTenantsResponse:
        pools = [self._pools.named(request.pool)] if request.pool else list(self._pools.by_name.values())
        pools.sort(key=lambda pool: pool.name)
        return pb.ListTenantsResponse(
            shares=[pool_wire.share(pool.name, share) for pool in pools for share in pool.shares()]
        )

    @unary
    async def UpdatePool(self, request: pb.UpdatePoolRequest, context: Context) -> pb.Pool:
        pool = self._pools.named(request.pool.name)
        pool_wire.resize(pool, request.pool)
        return pool_wire.pool(pool.name, pool.stats())

    @streaming
    async def WatchPool(
        self, request: pb.WatchPoolRequest, context: Context
    ) -> AsyncIterator[pb.WatchPoolResponse]:
        interval, heartbeat = pool_wire.watch_pace(request)
        async for when, pools in self._pools.watch(request.name, interval, heartbeat):
            told = [pool_wire.pool(name, stats) for name, stats in pools]
            yield pb.WatchPoolResponse(pools=told, read_time=timestamp(when))

    @unary
    async def PrewarmPool(self, request: pb.PrewarmPoolRequest, context: Context) -> pb.PrewarmPoolResponse:
        pool, clock = self._pools.named(request.name), self._pools.clock
        prepared = pool.announce(*pool_wire.announcement(request))
        return pool_wire.preparation(prepared, clock.wall() - clock.now())

    @unary
    async def ReloadConfig(
        self, request: pb.ReloadConfigRequest, context: Context
    ) -> pb.ReloadConfigResponse:
        return pool_wire.reloaded(await self._reload())
