"""Pools that tell their numbers as they change: paced, without a backlog, and to their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from sandboxd import Client, errors
from sandboxd.backends.fake import FakeScript
from sandboxd.changes import Changes, paced
from sandboxd.clock import ManualClock
from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.types import PoolState, PoolStats
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc
from sandboxd.wire import duration
from tests.sandboxd.conftest import settle

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
OpenRig = Callable[..., Any]


def has_warm(count: int) -> Callable[[PoolStats], bool]:
    return lambda stats: stats.warm == count


async def until(watch: AsyncGenerator[PoolStats, None], there: Callable[[PoolStats], bool]) -> PoolStats:
    async with asyncio.timeout(20):
        async for stats in watch:
            if there(stats):
                return stats
    raise AssertionError("the watch ended")


async def test_numbers_come_at_once_and_when_they_change(daemon: OpenDaemon) -> None:
    async with daemon() as client, contextlib.aclosing(client.watch_pool("python", interval=0.02)) as watch:
        full = await until(watch, lambda stats: stats.warm == 2)
        assert (full.state, full.next_free_seconds, full.oldest_wait_seconds) == (PoolState.OK, 0.0, None)
        assert full.starts_per_second > 0
        async with client.acquire("python", timeout=10):
            await until(watch, lambda stats: stats.active == 1 and stats.warm == 2)
        await until(watch, lambda stats: stats.active == 0 and stats.released_total == 1)


async def test_all_pools_and_those_that_do_not_exist(daemon: OpenDaemon) -> None:
    pools = {name: {"backend": "fake", "warm": 1} for name in ("b", "a")}
    async with daemon(pools=pools) as client:
        async with contextlib.aclosing(client.watch_pools()) as watch:
            assert list(await anext(watch)) == ["a", "b"]
        with pytest.raises(errors.PoolNotFound, match="this daemon has: a, b"):
            await anext(client.watch_pool("c"))
        with pytest.raises(errors.InvalidRequest, match=r"min_interval = .* must be from"):
            await anext(client.watch_pool("a", interval=0.001))
        with pytest.raises(errors.InvalidRequest, match="heartbeat = 1 s must be from min_interval, 2 s"):
            await anext(client.watch_pool("a", interval=2, heartbeat=1))


async def test_messages_keep_their_distance_however_much_changes(daemon: OpenDaemon) -> None:
    async with daemon(pools={"p": {"backend": "fake", "warm": 4}}) as client:
        stub = pb_grpc.PoolServiceStub(grpc.aio.insecure_channel(client.address))
        request = pb.WatchPoolRequest(name="pools/p", min_interval=duration(0.2), heartbeat=duration(0.5))
        call = stub.WatchPool(request)
        times: list[float] = []
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            churning = tasks.create_task(churn(client))
            while len(times) < 5:
                times.append((await call.read()).read_time.ToNanoseconds() / 1e9)
            churning.cancel()
            while len(times) < 10:  # The heartbeat goes on when nothing changes.
                times.append((await call.read()).read_time.ToNanoseconds() / 1e9)
        call.cancel()
        assert min(after - before for before, after in pairwise(times)) >= 0.19


async def churn(client: Client) -> None:
    while True:
        async with client.acquire("p", timeout=10):
            pass


async def test_a_slow_reader_gets_the_newest(daemon: OpenDaemon) -> None:
    async with (
        daemon(pools={"p": {"backend": "fake", "warm": 0}}) as client,
        contextlib.aclosing(client.watch_pool("p", interval=0.02)) as slow,
        contextlib.aclosing(client.watch_pool("p", interval=0.02)) as quick,
    ):
        await anext(slow)
        for warm in range(1, 30):
            await client.update_pool("p", warm=warm)
            await until(quick, has_warm(warm))
        # Twenty-nine states have passed; the last of them may still be on its way to this one.
        seen = [await anext(slow), await anext(slow)]
        assert seen[-1].warm_target == 29 or seen[0].warm_target == 29


async def test_a_watch_goes_on_with_the_next_daemon_and_ends_without_one(tmp_path: Path) -> None:
    pools = {"p": {"backend": "fake", "warm": 1}}
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=pools)
    async with contextlib.AsyncExitStack() as stack:

        async def watched(address: str, patience: float) -> tuple[Client, AsyncGenerator[PoolStats, None]]:
            client = await stack.enter_async_context(Client(address, patience=patience))
            watch = client.watch_pool("p", interval=0.02)
            return client, await stack.enter_async_context(contextlib.aclosing(watch))

        async with running(config) as addresses:
            client, watch = await watched(addresses[0], patience=30.0)
            await until(watch, lambda stats: stats.started_total == 1)
            await client.update_pool("p", warm=3)
            await until(watch, lambda stats: stats.warm == 3)
        coming = asyncio.ensure_future(until(watch, lambda stats: stats.started_total == 1))
        async with running(config) as addresses:
            assert (await coming).warm == 1
            # One that waits for a daemon for a moment only.
            _, watch = await watched(addresses[0], patience=0.5)
            await until(watch, lambda stats: stats.warm == 1)
        with pytest.raises(errors.BackendUnavailable):
            await until(watch, lambda _: False)


async def test_the_pace(clock: ManualClock) -> None:
    changes, looks = Changes(), []

    async def look() -> None:
        async for _ in paced(changes, clock, interval=1.0, heartbeat=5.0):
            looks.append(clock.now())  # noqa: PERF401 - looked at while they come

    looking = asyncio.create_task(look())
    for second in range(20):
        await settle()
        if second in (2, 3, 4):
            changes.tell()
            changes.tell()
            await settle()
        clock.advance(1.0)
    # At once; the changes, as they come but a second apart; then the heartbeat.
    assert looks == [0.0, 2.0, 3.0, 4.0, 9.0, 14.0, 19.0]
    changes.close()
    await looking


async def test_what_a_caller_may_expect(rig: OpenRig) -> None:
    async with rig(warm=1, size=2, starts=1, script=FakeScript(start_seconds=4.0)) as r:
        # Nothing was measured yet.
        assert r.pool.stats().next_free_seconds is None
        await r.advance(4.0)
        assert (r.pool.stats().start_seconds, r.pool.stats().next_free_seconds) == (4.0, 0.0)
        assert r.pool.stats().starts_per_second == 0.1
        await r.pool.acquire()
        await r.advance(1.0)
        assert r.pool.stats().next_free_seconds == 3.0
        await r.advance(3.0)
        await r.pool.acquire()
        waiting = asyncio.ensure_future(r.pool.acquire())
        await r.advance(2.5)
        assert r.pool.stats().oldest_wait_seconds == 2.5
        assert r.pool.stats().next_free_seconds is None
        await r.advance(20.0)
        assert r.pool.stats().starts_per_second == 0.0
        waiting.cancel()


async def test_a_pool_whose_last_start_failed_says_why(rig: OpenRig) -> None:
    broken = errors.StartFailed("no such image", retryable=False)
    async with rig(script=FakeScript(first_failures=[broken])) as r:
        with pytest.raises(errors.StartFailed):
            await r.pool.acquire()
        stats = r.pool.stats()
        assert (stats.state, "no such image" in stats.state_reason) == (PoolState.DEGRADED, True)
        await r.pool.acquire()
        assert r.pool.stats().state is PoolState.OK
        r.pool.drain()
        assert r.pool.stats().state is PoolState.DRAINING
