"""Faults of a backend's own code: each is told where it strikes, and ends neither the daemon nor a lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker.errors
import pytest

from sandboxd import errors
from sandboxd.availability import Availability, Looks
from sandboxd.backends import launching
from sandboxd.backends.docker import DockerBackend
from sandboxd.backends.engine import Engine
from sandboxd.backends.fake import FakeBackend, FakeConnection
from sandboxd.care import Care
from sandboxd.clock import ManualClock
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.recovery import RECLAIM_PAUSE_SECONDS, reclaim
from sandboxd.strays import AGAIN_SECONDS, sweep
from sandboxd.types import PoolState, Template

from .conftest import settle

pytestmark = pytest.mark.anyio
LOOKS = Looks(every=10.0, answer=10.0, pause=0.25, pause_limit=5.0, patience=10.0)


class Faulty(FakeConnection):
    """Its watch and its answers fail when they are told to."""

    def __init__(self, template: Template, watch: asyncio.Event, broken: set[str]) -> None:
        super().__init__(template)
        self._watch, self._broken = watch, broken

    async def wait_lost(self) -> str:
        await self._watch.wait()
        raise ValueError("no such key in the answer")

    async def ping(self) -> None:
        if "ping" in self._broken:
            raise OSError(24, "Too many open files")
        await super().ping()


class FaultyCode(FakeBackend):
    """The calls that are named in `broken` raise what no contract names."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.watch = asyncio.Event()
        self.broken: set[str] = set()

    def _strike(self, call: str) -> None:
        if call in self.broken:
            raise RuntimeError(f"{call} has a fault")

    async def check(self) -> None:
        self._strike("check")
        await super().check()

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        self.created_total += 1
        connection = self._alive[sandbox_id] = Faulty(template, self.watch, self.broken)
        return connection

    async def destroy(self, sandbox_id: str) -> None:
        self._strike("destroy")
        await super().destroy(sandbox_id)

    async def list_ids(self) -> list[str]:
        self._strike("list_ids")
        return await super().list_ids()


def pool_on(backend: FaultyCode, clock: ManualClock, warm: int = 1) -> Pool:
    options = PoolOptions(Bounds(warm, 4, 4, 4), care=Care(check_seconds=30.0))
    return Pool("p", backend=backend, template=Template("p"), options=options, clock=clock)


async def passing(clock: ManualClock, seconds: float) -> None:
    for _ in range(round(seconds / 0.25)):
        clock.advance(0.25)
        await settle()


async def test_a_watch_that_fails_is_a_loss(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    backend = FaultyCode(clock)
    pool = pool_on(backend, clock)
    async with pool.run():
        await settle()
        held = await pool.acquire()
        await settle()
        backend.watch.set()
        await settle()
        with pytest.raises(errors.SandboxLost, match="ValueError: no such key in the answer"):
            pool.get(held.id)
        backend.watch.clear()
        await settle()
        assert pool.get((await pool.acquire()).id)
    assert any(record.exc_info for record in caplog.records)


async def test_a_question_that_fails_is_no_answer(clock: ManualClock) -> None:
    backend = FaultyCode(clock)
    pool = pool_on(backend, clock)
    async with pool.run():
        await settle()
        (first,) = pool.sandboxes()
        backend.broken.add("ping")
        await passing(clock, 15.5)
        assert pool.stats().unhealthy_total == 1
        assert "Too many open files" in pool.failures()[0].message
        backend.broken.clear()
        assert (await pool.acquire()).id != first.id


async def test_a_look_that_fails_is_an_outage(clock: ManualClock) -> None:
    backend = FaultyCode(clock)
    pool, availability = pool_on(backend, clock), Availability(backend, clock, LOOKS)
    pool.depend_on(availability)
    async with pool.run():
        looking = asyncio.create_task(availability.run())
        await settle()
        held = await pool.acquire()
        backend.broken.add("check")
        await passing(clock, 11.0)
        assert pool.stats().state is PoolState.UNAVAILABLE
        assert "RuntimeError: check has a fault" in pool.stats().state_reason
        backend.broken.clear()
        await passing(clock, 6.0)
        assert pool.stats().state is PoolState.OK
        assert pool.get(held.id) is held
        assert not looking.done()
        looking.cancel()


@pytest.mark.parametrize("call", ["list_ids", "destroy"])
async def test_a_sweep_that_fails_is_made_again(clock: ManualClock, call: str) -> None:
    backend = FaultyCode(clock)
    availability = Availability(backend, clock, LOOKS)
    looking = asyncio.create_task(availability.run())
    sweeping = asyncio.create_task(sweep(backend, availability, set, clock))
    await settle()
    backend.script.trouble = "away"
    await passing(clock, 11.0)
    backend.broken.add(call)
    backend.script.trouble = ""
    await backend.create("p-stray", Template("p"))
    await passing(clock, 6.0)
    backend.broken.clear()
    assert await backend.list_ids() == ["p-stray"]
    await passing(clock, AGAIN_SECONDS)
    assert await backend.list_ids() == []
    for task in (sweeping, looking):
        assert not task.done()
        task.cancel()


async def test_what_is_nobodys_is_destroyed_in_spite_of_a_fault(clock: ManualClock) -> None:
    backend = FaultyCode(clock)
    await backend.create("p-left", Template("p"))
    backend.broken.add("destroy")
    reclaiming = asyncio.create_task(reclaim(backend, ["p-left"], clock))
    await settle()
    backend.broken.clear()
    clock.advance(RECLAIM_PAUSE_SECONDS)
    await reclaiming
    assert await backend.list_ids() == []


class RefusingEngine(Engine):
    """Answers every call with an error of its own."""

    async def call(self, function: Callable[[Any], Any]) -> Any:
        raise docker.errors.APIError("500 Server Error", explanation="layer store is locked")


async def test_what_the_engine_refuses_is_said_as_an_outage(tmp_path: Path) -> None:
    engine = RefusingEngine(f"unix://{tmp_path}/docker.sock")
    with pytest.raises(errors.BackendUnavailable, match="container x could not be looked at"):
        await engine.ended("x")
    with pytest.raises(errors.BackendUnavailable, match="could not list its containers: layer store is lock"):
        await DockerBackend(tmp_path / "state", engine=engine).list_ids()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process has as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_no_descriptor_left_is_an_outage_of_the_engine(tmp_path: Path) -> None:
    engine = Engine(f"unix://{tmp_path}/docker.sock")
    with no_descriptor_left():
        with pytest.raises(errors.BackendUnavailable, match="cannot be reached: Too many open files"):
            await engine.ping()
        with pytest.raises(errors.BackendUnavailable, match="cannot be reached: Too many open files"):
            await engine.open()


async def test_no_descriptor_left_is_an_outage_of_the_launcher() -> None:
    with no_descriptor_left():
        with pytest.raises(errors.BackendUnavailable, match=r"cannot be started: .*Too many open files"):
            await launching.launch("/usr/bin/python3", {})
        with pytest.raises(errors.BackendUnavailable, match="cannot be watched: Too many open files"):
            launching.end_of(os.getpid())
