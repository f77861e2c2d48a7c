"""The end of a daemon: new work is refused at once, leases go on for a time, then they are reclaimed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sandboxd import Box, Client, errors
from sandboxd.types import Event, PoolState, Started, Stdout

pytestmark = pytest.mark.anyio

POOL = '[pools.p]\nbackend = "fake"\nwarm = 2\n'


@contextlib.asynccontextmanager
async def daemon(tmp_path: Path, drain_seconds: float) -> AsyncIterator[tuple[Process, Client]]:
    config, log = tmp_path / "sandboxd.toml", tmp_path / "log"
    config.write_text(f"drain_seconds = {drain_seconds}\n{POOL}")
    command = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", tmp_path / "s"]
    with log.open("wb") as errors_:
        process = await asyncio.create_subprocess_exec(*map(str, command), stdout=PIPE, stderr=errors_)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        async with Client(line.split(" serving ")[1].split(";")[0], patience=0.0) as client:
            yield process, client
            assert await ended(process) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "Traceback" not in log.read_text()


async def ended(process: Process) -> int:
    async with asyncio.timeout(30):
        return await process.wait()


async def drains(client: Client) -> None:
    """Returns when the daemon has begun to drain."""
    async with asyncio.timeout(20), contextlib.aclosing(client.watch_pool("p", interval=0.02)) as watch:
        async for stats in watch:
            if stats.state is PoolState.DRAINING:
                return


async def expiry(client: Client) -> float | None:
    """Of the one lease."""
    (expires,) = [info.expires async for info in client.list_sandboxes() if info.state == "ACTIVE"]
    return expires


async def health(client: Client, service: str = "") -> int:
    async with grpc.aio.insecure_channel(client.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


async def test_leases_go_on_and_new_work_is_refused(tmp_path: Path) -> None:
    async with daemon(tmp_path, drain_seconds=600) as (process, client):
        box = await client.acquire("p", timeout=10, ttl=4.0)
        assert await health(client) == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        await drains(client)
        assert await health(client) == health_pb2.HealthCheckResponse.NOT_SERVING
        for refused in (client.acquire("p", timeout=10), client.acquire_gang("p", 2, timeout=10)):
            with pytest.raises(errors.Draining, match="the daemon is shutting down"):
                await refused
        with pytest.raises(errors.Draining):
            async with box.fork(1):
                pass
        with pytest.raises(errors.Draining):
            await client.prewarm("p", 3)
        # It is also renewed.
        first = await expiry(client)
        async with asyncio.timeout(20):
            while await expiry(client) == first:
                await asyncio.sleep(0.02)
        assert (await box.exec(["true"])).ok
        assert process.returncode is None
        await box.release()
        await ended(process)


async def test_what_has_not_ended_in_time_is_reclaimed_and_its_holder_hears_so(tmp_path: Path) -> None:
    async with daemon(tmp_path, drain_seconds=0.5) as (process, client):
        box = await client.acquire("p", timeout=10)
        sleeping = await _sleeping(box)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(errors.SandboxLost) as raised:
            await anext(sleeping)
        assert raised.value.mask
        await ended(process)
    assert "1 leases had not ended after 0.5 s" in (tmp_path / "log").read_text()


async def _sleeping(box: Box) -> AsyncIterator[Event]:
    """What a command tells that runs by now, and that tells no more before it ends."""
    events = box.stream(["sh", "-c", "echo; exec sleep 100"])
    assert isinstance(await anext(events), Started)
    assert await anext(events) == Stdout(b"\n", 0)
    return events


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(tmp_path: Path, second: signal.Signals) -> None:
    async with daemon(tmp_path, drain_seconds=600) as (process, client):
        box = await client.acquire("p", timeout=10)
        sleeping = await _sleeping(box)
        process.send_signal(signal.SIGTERM)
        await drains(client)
        process.send_signal(second)
        # The sandbox is reclaimed and the call cut off, whichever it hears of first.
        with pytest.raises((errors.SandboxLost, errors.BackendUnavailable)) as raised:
            await anext(sleeping)
        assert raised.value.mask
        await ended(process)


async def test_without_leases_it_ends_at_once_whoever_watches(tmp_path: Path) -> None:
    async with daemon(tmp_path, drain_seconds=600) as (process, client):
        watch = client.watch_pool("p", interval=0.02)
        await anext(watch)
        process.send_signal(signal.SIGINT)
        with pytest.raises(errors.BackendUnavailable):
            async for _ in watch:
                pass
        await ended(process)


async def test_it_ends_with_the_terminal_that_it_was_started_on(tmp_path: Path) -> None:
    config = tmp_path / "sandboxd.toml"
    config.write_text(POOL)
    serve = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", tmp_path / "s"]
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        "setsid", "--ctty", *map(str, serve), stdin=theirs, stdout=PIPE
    )
    os.close(theirs)
    assert process.stdout is not None
    assert b" serving " in await process.stdout.readline()
    os.close(ours)
    assert await ended(process) == 0
