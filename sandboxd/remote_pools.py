"""What a client asks of a daemon's pools: their numbers, once or as they change, and their bounds."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from sandboxd import replies
from sandboxd.errors import BackendUnavailable
from sandboxd.patience import Patience
from sandboxd.replies import PrewarmPlan
from sandboxd.requests import message, span
from sandboxd.status import translated
from sandboxd.types import POOL_PREFIX, PoolStats, Reloaded, Share
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

# Calls that the daemon answers at once end after this time at the latest.
CALL_TIMEOUT_SECONDS = 30.0
INTERVAL_SECONDS, HEARTBEAT_SECONDS = 0.25, 5.0
# A daemon that misses so many heartbeats is taken for gone, though the connection stands.
HEARTBEATS_MISSED = 3
ALL_POOLS = "-"


class RemotePools:
    """The part of a client that speaks of pools."""

    pools: pb_grpc.PoolServiceStub

    def __init__(self, patience: Patience) -> None:
        self.patience = patience

    async def answered(
        self, method: Callable[..., Awaitable[Any]], request: object, timeout: float = CALL_TIMEOUT_SECONDS
    ) -> Any:
        """The reply to a call that the daemon answers at once and that may be repeated."""
        return await self.patience.call(lambda: method(request, timeout=timeout), at_most=timeout)

    async def get_pool(self, pool: str) -> PoolStats:
        """Counts and totals of one pool. Raises PoolNotFound."""
        request = message(pb.GetPoolRequest, name=POOL_PREFIX + pool)
        reply = await self.answered(self.pools.GetPool, request)
        return replies.stats(reply)

    async def list_pools(self) -> dict[str, PoolStats]:
        """All pools by name."""
        reply = await self.answered(self.pools.ListPools, pb.ListPoolsRequest())
        return replies.pools(reply.pools)

    async def list_tenants(self, pool: str | None = None) -> dict[str, list[Share]]:
        """Who holds sandboxes and who waits, by pool; of all pools when None. Raises PoolNotFound.

        A pool with neither is left out.
        """
        request = message(pb.ListTenantsRequest, pool=POOL_PREFIX + pool if pool else "")
        return replies.shares((await self.answered(self.pools.ListTenants, request)).shares)

    async def update_pool(
        self, pool: str, *, warm: int | None = None, size_limit: int | None = None
    ) -> PoolStats:
        """Changes a pool's target or limit until the daemon restarts."""
        wanted = message(pb.Pool, name=POOL_PREFIX + pool, warm_count_target=warm, size_limit=size_limit)
        reply = await self.answered(self.pools.UpdatePool, pb.UpdatePoolRequest(pool=wanted))
        return replies.stats(reply)

    async def prewarm(
        self,
        pool: str,
        count: int,
        *,
        by: float = 0.0,
        grace: float | None = None,
        announcement_id: str | None = None,
    ) -> PrewarmPlan:
        """Announces that `count` sandboxes will be wanted in `by` seconds, and returns what the pool will do.

        Those that nobody acquires are kept `grace` seconds longer (a minute). The same `announcement_id`
        again changes what was announced, and a count of 0 withdraws it. Raises PoolNotFound, InvalidRequest.
        """
        request = message(
            pb.PrewarmPoolRequest,
            name=POOL_PREFIX + pool,
            count=count,
            within=span(by, "by"),
            grace=None if grace is None else span(grace, "grace"),
            announcement_id=announcement_id or uuid.uuid4().hex,
        )
        return replies.prewarm_plan(await self.answered(self.pools.PrewarmPool, request))

    async def reload_config(self) -> Reloaded:
        """Has the daemon read its settings again. Raises InvalidRequest with the fault in them."""
        return replies.reloaded(await self.answered(self.pools.ReloadConfig, pb.ReloadConfigRequest()))

    async def watch_pool(
        self, pool: str, *, interval: float = INTERVAL_SECONDS, heartbeat: float = HEARTBEAT_SECONDS
    ) -> AsyncGenerator[PoolStats, None]:
        """Yields a pool's numbers at once and then whenever they change, as long as the daemon has the pool.

        At most once in `interval` seconds, and at least once in `heartbeat` seconds. Whoever takes long over
        one gets the newest next. A daemon that restarts is waited for. Raises PoolNotFound,
        BackendUnavailable.
        """
        async with contextlib.aclosing(self._watched(pool, interval, heartbeat)) as watched:
            async for pools in watched:
                yield pools[pool]

    async def watch_pools(
        self, *, interval: float = INTERVAL_SECONDS, heartbeat: float = HEARTBEAT_SECONDS
    ) -> AsyncGenerator[dict[str, PoolStats], None]:
        """As `watch_pool`, of all pools by name, those that come later included."""
        async with contextlib.aclosing(self._watched(ALL_POOLS, interval, heartbeat)) as watched:
            async for pools in watched:
                yield pools

    async def _watched(
        self, pool: str, interval: float, heartbeat: float
    ) -> AsyncGenerator[dict[str, PoolStats], None]:
        request = message(
            pb.WatchPoolRequest,
            name=POOL_PREFIX + pool,
            min_interval=span(interval, "interval"),
            heartbeat=span(heartbeat, "heartbeat"),
        )
        while True:
            reader = _Reader(HEARTBEATS_MISSED * heartbeat)
            try:
                await self.patience.call(partial(reader.open, self.pools.WatchPool, request))
                async with contextlib.aclosing(reader.newest()) as told:
                    async for reply in told:
                        yield replies.pools(reply.pools)
            except BackendUnavailable:
                if not reader.opened:
                    raise
            finally:
                reader.close()


class _Reader:
    """Reads one watch as fast as it comes and keeps the newest: what is behind in the connection is old."""

    def __init__(self, silence: float) -> None:
        self.opened = False
        self._silence = silence
        self._call: Any = None
        self._there = asyncio.Event()
        self._newest: pb.WatchPoolResponse | None = None

    async def open(self, method: Callable[[pb.WatchPoolRequest], Any], request: pb.WatchPoolRequest) -> None:
        """Begins the watch, and returns when the first message has come. Raises AioRpcError."""
        self._call = method(request)
        self._newest = await self._call.read()
        self.opened = True

    async def newest(self) -> AsyncGenerator[pb.WatchPoolResponse, None]:
        """Raises BackendUnavailable when the daemon is gone, and what it ended the watch with."""
        reading = asyncio.create_task(self._read())
        try:
            while True:
                self._there.clear()
                if self._newest is not None:
                    told, self._newest = self._newest, None
                    yield told
                elif reading.done():
                    reading.result()
                    return
                else:
                    await self._there.wait()
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def _read(self) -> None:
        try:
            with translated():
                while (reply := await self._next()) is not grpc.aio.EOF:
                    self._newest = reply
                    self._there.set()
        finally:
            self._there.set()

    async def _next(self) -> Any:
        try:
            async with asyncio.timeout(self._silence):
                return await self._call.read()
        except TimeoutError:
            raise BackendUnavailable(f"the daemon told nothing for {self._silence:g} s") from None

    def close(self) -> None:
        """Ends the call."""
        if self._call is not None:
            self._call.cancel()
