"""A launcher that is killed under load, or hung: errors that say so, then sandboxes again, and none left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sandboxd import Client, errors
from sandboxd.availability import Availability, Looks
from sandboxd.backends.connection import GuestConnection
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.clock import MonotonicClock
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.types import PoolState, PoolStats, Template
from tests.sandboxd.docker_kit import run
from tests.sandboxd.namespace_kit import inhabited, leftovers

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
LOOKS = Looks(every=0.2, answer=0.5, pause=0.1, pause_limit=0.3, patience=1.0)
SERVING = health_pb2.HealthCheckResponse.SERVING


def launcher_of(state: Path) -> int:
    """The process that forks the sandboxes of this state directory."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                where = (entry / "cwd").readlink()
                if (entry / "comm").read_text() == "sandboxd-launch\n" and _is_below(where, entry, state):
                    return int(entry.name)
    raise AssertionError(f"no launcher in {state}")


def _is_below(where: Path, entry: Path, state: Path) -> bool:
    return str(state) in str(where) or str(state) in (entry / "mountinfo").read_text()


async def test_a_launcher_killed_under_load(daemon: OpenDaemon, tmp_path: Path) -> None:
    pools = {
        "ns": {"backend": "namespace", "warm": 8, "size_limit": 64, "start_limit": 8},
        "fake": {"backend": "fake", "warm": 2},
    }
    state = tmp_path / "state" / "namespace"
    async with daemon(pools=pools) as client, contextlib.AsyncExitStack() as stack:
        health = await stack.enter_async_context(watched_health(client, "pools/fake"))
        met: Counter[str] = Counter()
        async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
            for _ in range(16):
                tasks.create_task(rollouts(client, met))
            for _ in range(2):
                await until(client, have_ended(met, met["done"] + 20))
                os.kill(launcher_of(state), signal.SIGKILL)
            await until(client, lambda stats: met["done"] >= 200)
            met["over"] = 1
        # What was lost is said to be, and nothing else went wrong.
        assert set(met) <= {"done", "over", "SANDBOX_LOST", "START_FAILED"}
        assert 0 < met["SANDBOX_LOST"] <= 2 * 64
        stats = await until(
            client, lambda stats: stats.warm == 8 and not stats.deleting and not stats.starting
        )
        assert stats.state is PoolState.OK
        # No more on the host than the pool knows of.
        assert len(inhabited(state)) == 8
        assert stats.acquired_total == stats.released_total + stats.expired_total + stats.lost_total
        assert set(health) == {SERVING}
    assert leftovers(state) == []


def _is_settled(stats: PoolStats) -> bool:
    return stats.warm == 8 and not (stats.starting or stats.active or stats.deleting)


async def rollouts(client: Client, met: Counter[str]) -> None:
    while not met["over"]:
        try:
            async with client.acquire("ns", timeout=30) as box:
                assert (await box.exec(["echo", "on"], output_limit=100)).stdout == b"on\n"
                met["done"] += 1
        except errors.SandboxdError as error:
            met[error.reason if error.mask else f"unmasked {error.reason}"] += 1


def have_ended(met: Counter[str], count: int) -> Callable[[PoolStats], bool]:
    return lambda _: met["done"] >= count


async def until(client: Client, there: Callable[[PoolStats], bool]) -> PoolStats:
    async with asyncio.timeout(40), contextlib.aclosing(client.watch_pool("ns", interval=0.02)) as watch:
        async for stats in watch:
            if there(stats):
                return stats
    raise AssertionError("the watch ended")


@contextlib.asynccontextmanager
async def watched_health(client: Client, service: str) -> AsyncIterator[list[int]]:
    """All that a health check says of a service meanwhile."""
    said: list[int] = []

    async def watch() -> None:
        request = health_pb2.HealthCheckRequest(service=service)
        async with grpc.aio.insecure_channel(client.address) as channel:
            async for told in health_pb2_grpc.HealthStub(channel).Watch(request):
                said.append(told.status)  # noqa: PERF401 - looked at while they come

    watching = asyncio.create_task(watch())
    try:
        yield said
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def test_a_launcher_that_is_hung_and_goes_on(backend: NamespaceBackend) -> None:
    options = PoolOptions(Bounds(2, 20, 4, 100), default_ttl=600.0)
    pool = Pool("p", backend=backend, template=Template("p", start_timeout=2.0), options=options)
    availability = Availability(backend, MonotonicClock(), LOOKS)
    pool.depend_on(availability)
    assert backend.launcher_pid is not None
    async with pool.run():
        looking = asyncio.create_task(availability.run())
        await pool_until(pool, lambda stats: stats.warm == 2)
        os.kill(backend.launcher_pid, signal.SIGSTOP)
        try:
            held = [await pool.acquire(timeout=10), await pool.acquire(timeout=10)]
            # Ready ones answer without it.
            assert (await run(pool.connection(held[0].id), "echo", "on")).stdout == b"on\n"
            begin = time.monotonic()
            with pytest.raises(errors.BackendUnavailable, match="gave no answer within"):
                await pool.acquire(timeout=60)
            assert time.monotonic() - begin < 20
            assert pool.stats().state is PoolState.UNAVAILABLE
        finally:
            os.kill(backend.launcher_pid, signal.SIGCONT)
        stats = await pool_until(pool, _is_back)
        assert (stats.active, stats.lost_total) == (2, 0)
        assert (await run(pool.connection(held[1].id), "echo", "on")).stdout == b"on\n"
        # What was begun meanwhile for nobody is gone as well.
        async with asyncio.timeout(20):
            while len(await backend.list_ids()) != 4:
                await asyncio.sleep(0.02)
        looking.cancel()


async def test_a_name_is_free_again_after_a_launcher_that_was_hung_throughout(tmp_path: Path) -> None:
    backend = NamespaceBackend(tmp_path / "state", NamespaceOptions(answer_seconds=2.0))
    await backend.open()
    assert backend.launcher_pid is not None
    os.kill(backend.launcher_pid, signal.SIGSTOP)
    try:
        # Given up, as by `start_timeout`, and its destruction is not answered either.
        with pytest.raises(errors.BackendUnavailable, match="no answer to 'destroy'"):
            async with asyncio.timeout(0.1):
                await backend.create("p-1", Template("p"))
    finally:
        os.kill(backend.launcher_pid, signal.SIGCONT)
    connection = await created(backend, "p-1")
    assert (await run(connection, "echo", "on")).stdout == b"on\n"
    await connection.close()
    await backend.close()


async def created(backend: NamespaceBackend, name: str) -> GuestConnection:
    async with asyncio.timeout(20):
        while True:
            try:
                return await backend.create(name, Template("p"))
            except errors.StartFailed as error:
                # The launcher still removes the one before.
                if not error.retryable:
                    raise
                await asyncio.sleep(0.02)


def _is_back(stats: PoolStats) -> bool:
    return stats.state is PoolState.OK and stats.warm == 2 and not stats.starting


async def pool_until(pool: Pool, there: Callable[[PoolStats], bool]) -> PoolStats:
    with pool.changes.watched() as changed:
        async with asyncio.timeout(40):
            while not there(pool.stats()):
                changed.clear()
                await changed.wait()
    return pool.stats()
