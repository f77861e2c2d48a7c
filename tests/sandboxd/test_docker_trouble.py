"""A Docker Engine that is stopped, hung and back: bounded errors, and no container too many."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sandboxd import Box, Client, errors
from sandboxd.availability import Availability, Looks
from sandboxd.backends.docker import DockerBackend
from sandboxd.backends.docker_images import LABEL
from sandboxd.backends.engine import Engine
from sandboxd.backends.native import PROGRAM
from sandboxd.clock import MonotonicClock
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.strays import sweep
from sandboxd.types import Command, PoolState, PoolStats, Template
from tests.sandboxd.docker_kit import engine, run
from tests.sandboxd.engine_proxy import EngineProxy, engine_proxy

pytestmark = [pytest.mark.anyio]
CALL_SECONDS = 3.0
LOOKS = Looks(every=0.5, answer=1.0, pause=0.1, pause_limit=0.3, patience=1.0)


class Trouble:
    """A pool of containers behind an Engine that can be troubled."""

    def __init__(self, pool: Pool, backend: DockerBackend, proxy: EngineProxy) -> None:
        self.pool, self.backend, self.proxy = pool, backend, proxy

    async def until(self, there: Callable[[PoolStats], bool]) -> PoolStats:
        with self.pool.changes.watched() as changed:
            async with asyncio.timeout(30):
                while not there(self.pool.stats()):
                    changed.clear()
                    await changed.wait()
        return self.pool.stats()

    async def containers(self) -> int:
        """All that exist, by the word of the Engine itself."""
        async with engine() as host:
            filters = {"label": f"{LABEL}={self.backend._instance}"}
            return len(await host.call(lambda api: api.containers(all=True, filters=filters)))


@contextlib.asynccontextmanager
async def trouble(tmp_path: Path, image: str, *, warm: int, guest: Path = PROGRAM) -> AsyncIterator[Trouble]:
    clock = MonotonicClock()
    async with engine_proxy(tmp_path / "docker.sock") as proxy:
        behind = Engine(proxy.url, call_seconds=CALL_SECONDS)
        backend = DockerBackend(tmp_path / "state", engine=behind, guest=guest)
        await backend.open()
        availability = Availability(backend, clock, LOOKS)
        options = PoolOptions(Bounds(warm, 20, 4, 100), default_ttl=600.0)
        template = Template("p", image=image, start_timeout=5.0)
        pool = Pool("p", backend=backend, template=template, options=options)
        pool.depend_on(availability)

        def known() -> set[str]:
            return {sandbox.id for sandbox in pool.sandboxes()}

        tasks = [
            asyncio.create_task(availability.run()),
            asyncio.create_task(sweep(backend, availability, known, clock)),
        ]
        try:
            async with pool.run():
                yield Trouble(pool, backend, proxy)
                proxy.go_on()
        finally:
            for task in tasks:
                task.cancel()
            await backend.close()


@pytest.mark.docker
async def test_an_engine_that_is_stopped_and_started(tmp_path: Path, docker_python_image: str) -> None:
    async with trouble(tmp_path, docker_python_image, warm=2) as t:
        await t.until(lambda stats: stats.warm == 2)
        await t.proxy.stop()
        assert "no Docker Engine answers" in (await t.until(_is(PoolState.UNAVAILABLE))).state_reason
        # What is ready works on: its guest does not need the Engine.
        held = [await t.pool.acquire(timeout=10), await t.pool.acquire(timeout=10)]
        for sandbox in held:
            assert (await run(t.pool.connection(sandbox.id), "echo", "on")).stdout == b"on\n"
        begin = time.monotonic()
        with pytest.raises(errors.BackendUnavailable, match="no Docker Engine answers"):
            await t.pool.acquire(timeout=30)
        assert time.monotonic() - begin < 20
        t.pool.release(held[0].id)
        await t.proxy.start()
        await t.until(lambda stats: stats.state is PoolState.OK and stats.warm == 2 and not stats.deleting)
        assert (await run(t.pool.connection(held[1].id), "echo", "on")).stdout == b"on\n"
        assert await t.containers() == 3


@pytest.mark.docker
async def test_an_engine_that_is_hung_and_goes_on(tmp_path: Path, docker_python_image: str) -> None:
    """What it was asked for before is made when it goes on, though nobody waits for it any more."""
    async with trouble(tmp_path, docker_python_image, warm=1) as t:
        await t.until(lambda stats: stats.warm == 1)
        t.proxy.hang()
        await t.pool.acquire(timeout=10)
        begin = time.monotonic()
        waiting = [asyncio.ensure_future(t.pool.acquire(timeout=60)) for _ in range(6)]
        for one in waiting:
            with pytest.raises(errors.BackendUnavailable, match="gave no answer"):
                await one
        assert time.monotonic() - begin < 30
        assert t.pool.stats().state is PoolState.UNAVAILABLE
        t.proxy.go_on()
        await t.until(lambda stats: stats.state is PoolState.OK and stats.warm == 1)
        sandbox = await t.pool.acquire(timeout=30)
        assert (await run(t.pool.connection(sandbox.id), "echo", "on")).stdout == b"on\n"
        await t.until(lambda stats: stats.warm == 1 and not stats.starting and not stats.deleting)
        async with asyncio.timeout(20):
            while await t.containers() != 3:
                await asyncio.sleep(0.05)
        assert t.pool.stats().active == 2


@pytest.mark.docker
async def test_a_command_of_a_hung_engine_ends(tmp_path: Path, docker_busybox_image: str) -> None:
    """Without a guest a command's output comes through the Engine: its time-out must not wait for it."""
    async with trouble(tmp_path, docker_busybox_image, warm=0, guest=tmp_path / "not-built") as t:
        sandbox = await t.pool.acquire(timeout=30)
        connection = t.pool.connection(sandbox.id)
        async with connection.exec(Command((b"sleep", b"100"), timeout=0.2)) as events:
            await anext(aiter(events))
            t.proxy.hang()
            begin = time.monotonic()
            with pytest.raises(errors.BackendUnavailable):
                async for _ in events:
                    pass
        assert time.monotonic() - begin < 30
        # It was asked in vain to kill the command, then the sandbox, and does so when it goes on.
        t.proxy.go_on()
        await t.until(lambda stats: stats.lost_total == 1 and stats.state is PoolState.OK)
        with pytest.raises(errors.SandboxLost):
            t.pool.get(sandbox.id)


def _is(state: PoolState) -> Callable[[PoolStats], bool]:
    return lambda stats: stats.state is state


async def test_no_call_waits_for_ever_for_an_engine_that_is_silent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        # Whoever connects waits in its queue: nobody takes them out.
        listening.bind(str(tmp_path / "silent.sock"))
        listening.listen(8)
        silent = Engine(f"unix://{tmp_path}/silent.sock", call_seconds=0.4)
        async with asyncio.timeout(20):
            with pytest.raises(errors.BackendUnavailable, match="no Docker Engine at"):
                await silent.open()
            with pytest.raises(errors.BackendUnavailable, match=r"gave no answer within 0\.2 s"):
                await silent.ping(0.2)
            with pytest.raises(errors.BackendUnavailable, match=r"gave no answer within 0\.4 s"):
                await silent.stream("/containers/x/attach")
            with pytest.raises(errors.BackendUnavailable, match=r"gave no answer within 0\.4 s"):
                await silent.wait_ended("x")
        silent.close()


@pytest.mark.docker
async def test_health_is_of_the_backend_alone(tmp_path: Path, docker_python_image: str) -> None:
    config = tmp_path / "sandboxd.toml"
    config.write_text(
        f'drain_seconds = 0\n[pools.box]\nbackend = "docker"\nimage = "{docker_python_image}"\nwarm = 1\n'
        '[pools.fake]\nbackend = "fake"\nwarm = 1\n'
    )
    serve = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", tmp_path / "s"]
    async with engine_proxy(tmp_path / "docker.sock") as proxy:
        process = await asyncio.create_subprocess_exec(
            *map(str, serve), stdout=PIPE, env={**os.environ, "DOCKER_HOST": proxy.url}
        )
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        async with Client(line.split(" serving ")[1].split(";")[0]) as client:
            async with client.acquire("box", timeout=30) as box:
                await proxy.stop()
                # Nobody looks at it sooner than when something fails on it.
                waiting = asyncio.ensure_future(_acquired(client))
                assert await _health(client, "backends/docker", "NOT_SERVING")
                assert await _health(client, "pools/box", "NOT_SERVING")
                for name in ("", "sandboxd.v1.SandboxService", "backends/fake", "pools/fake"):
                    assert await _health(client, name, "SERVING"), name
                async with client.acquire("fake", timeout=10) as other:
                    assert (await other.exec(["true"])).ok
                assert (await box.exec(["true"])).ok
                await proxy.start()
                assert await _health(client, "pools/box", "SERVING")
                await (await waiting).release()
        process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def _acquired(client: Client) -> Box:
    await client.acquire("box", timeout=30)
    return await client.acquire("box", timeout=30)


async def _health(client: Client, service: str, status: str) -> bool:
    """True once it is so; the answers are watched."""
    wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
    async with asyncio.timeout(30), grpc.aio.insecure_channel(client.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        async for told in watch:
            if told.status == wanted:
                return True
    return False
