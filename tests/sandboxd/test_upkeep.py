"""Pools that come and go while the daemon runs, on backends that the test opens and holds up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2

from sandboxd import errors
from sandboxd.availability import Availability
from sandboxd.backend_set import BackendSet, OpenBackend
from sandboxd.backends.fake import FakeBackend
from sandboxd.clock import ManualClock
from sandboxd.config import Config, load
from sandboxd.doctor.facts import Facts
from sandboxd.health_checks import HealthChecks
from sandboxd.journal_file import JournalFile
from sandboxd.upkeep import Surroundings, Upkeep

from .conftest import settle

pytestmark = pytest.mark.anyio


class Gated(FakeBackend):
    """Destroys while its gate is open."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.gate = asyncio.Event()
        self.gate.set()

    async def destroy(self, sandbox_id: str) -> None:
        await self.gate.wait()
        await super().destroy(sandbox_id)


class Opened(BackendSet):
    """The one backend that the test has made."""

    def __init__(self, config: Config, backend: Gated, clock: ManualClock) -> None:
        super().__init__(config, clock)
        self._open = {"fake": OpenBackend(backend, Availability(backend, clock))}


class Daemon:
    """What runs the pools, without a server; `warm` says how many each keeps."""

    def __init__(self, tmp_path: Path, clock: ManualClock, **warm: int) -> None:
        self._path = tmp_path
        self.backend = Gated(clock)
        self.journal = JournalFile(tmp_path / "journal.sqlite3")
        config = self._config(warm)
        around = Surroundings(Opened(config, self.backend, clock), self.journal, Facts(), clock)
        self.upkeep = Upkeep(config, around)
        self.pools = self.upkeep.pools

    def _config(self, warm: dict[str, int]) -> Config:
        pools = {name: {"backend": "fake", "warm": count} for name, count in warm.items()}
        return load(None, state_dir=self._path / "state", pools=pools)

    async def become(self, **warm: int) -> None:
        config = self._config(warm)
        await self.upkeep.reload(lambda: config)
        await settle()


@contextlib.asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[Daemon]:
    with daemon.journal.open():
        async with asyncio.timeout(30), daemon.upkeep.run():
            await settle()
            yield daemon
            daemon.backend.gate.set()
    assert await daemon.backend.list_ids() == []


async def test_a_pool_is_made_anew_while_its_old_self_ends(tmp_path: Path, clock: ManualClock) -> None:
    async with running(Daemon(tmp_path, clock, a=1, b=2)) as daemon:
        old = {sandbox.id for sandbox in daemon.pools.by_name["b"].sandboxes()}
        daemon.backend.gate.clear()
        await daemon.become(a=1)
        assert "b" not in daemon.pools.by_name
        await daemon.become(a=1, b=2)
        new = daemon.pools.by_name["b"]
        sandbox = await new.acquire(timeout=1.0)
        assert sandbox.id not in old
        assert await _is_served(daemon, "pools/b")
        # A sweep must not take the old ones for nobody's, nor the listing leave them out.
        assert old < daemon.pools.sandbox_ids()
        daemon.backend.gate.set()
        await settle()
        assert old.isdisjoint(daemon.pools.sandbox_ids())
        assert daemon.pools.by_name["b"] is new
        assert new.get(sandbox.id) is sandbox


async def test_nothing_refers_to_a_pool_that_has_ended(tmp_path: Path, clock: ManualClock) -> None:
    async with running(Daemon(tmp_path, clock, a=1, b=1)) as daemon:
        ended = weakref.ref(daemon.pools.by_name["b"])
        await daemon.become(a=1)
        gc.collect()
        assert ended() is None


async def _is_served(daemon: Daemon, service: str) -> bool:
    servicer: Any = health.aio.HealthServicer()
    await HealthChecks(servicer, daemon.upkeep).tell()
    told = await servicer.Check(health_pb2.HealthCheckRequest(service=service), None)
    return bool(told.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_pool_that_ends_is_no_more_served(tmp_path: Path, clock: ManualClock) -> None:
    async with running(Daemon(tmp_path, clock, a=1, b=1)) as daemon:
        daemon.backend.gate.clear()
        await daemon.become(a=1)
        with pytest.raises(errors.PoolNotFound):
            daemon.pools.named("pools/b")
        daemon.backend.gate.set()
        await settle()
        assert len(daemon.pools.every()) == 1
