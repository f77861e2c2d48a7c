"""What a daemon makes of what a killed one left on its host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxd.backend_set import BackendSet
from sandboxd.backends.fake import FakeBackend
from sandboxd.clock import ManualClock
from sandboxd.config import Config
from sandboxd.doctor import needs
from sandboxd.doctor.facts import Facts, Groups
from sandboxd.journal import Entry
from sandboxd.journal_file import JournalFile
from sandboxd.ledger import Totals
from sandboxd.types import Template
from sandboxd.upkeep import Surroundings, Upkeep

from .conftest import settle

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def upkeep_on(
    backend: FakeBackend, path: Path, clock: ManualClock, facts: Facts | None = None
) -> AsyncIterator[Upkeep]:
    """One pool of up to 100, on a backend that is there already."""
    pools = {"p": {"backend": "fake", "warm": 0, "size_limit": 100}}
    config = Config.model_validate({"state_dir": path, "images_dir": path, "pools": pools})
    async with BackendSet(config, clock, lambda _kind, _config: backend) as backends:
        await backends.open_for(config)
        with JournalFile(path / "journal.sqlite3", clock).open() as journal:
            upkeep = Upkeep(config, Surroundings(backends, journal, facts or Facts(), clock))
            async with upkeep.run():
                yield upkeep


async def test_what_survived_is_no_load_beside_the_pools(tmp_path: Path, clock: ManualClock) -> None:
    backend, need = FakeBackend(clock=clock), needs.OWN_TASKS["fake"]
    for number in range(10):
        await backend.create(f"p-{number}", Template("p"))
    groups = Groups(pids_max=needs.TASKS_KEPT + 20 * need, pids_now=10 * need, pids_group="/")
    async with upkeep_on(backend, tmp_path, clock, Facts(groups=groups)) as upkeep:
        await settle()
        (pool,) = upkeep.pools.every()
        assert pool.stats().size_limit == 20


async def test_copies_that_no_fork_uses_any_more_are_removed(tmp_path: Path, clock: ManualClock) -> None:
    backend, template = FakeBackend(clock=clock), Template("p")
    await backend.create("p-source", template)
    forks = await backend.branch("p-source", template, "used")
    await backend.branch("p-source", template, "begun")
    await backend.create("p-fork", forks)
    with JournalFile(tmp_path / "journal.sqlite3", clock).open() as journal:
        own = journal.pool("p")
        own.keep(Entry("p-fork", 0.0, template.digest, expiry=99.0, ttl=99.0, branches=forks.branches))
        own.commit(Totals(acquired=1))
    async with upkeep_on(backend, tmp_path, clock) as upkeep:
        (pool,) = upkeep.pools.every()
        async with asyncio.timeout(20):
            while backend.branches() != ["used"]:
                await asyncio.sleep(0)
        assert await backend.list_ids() == ["p-fork"]
        pool.release("p-fork")
        async with asyncio.timeout(20):
            while backend.branches():
                await asyncio.sleep(0)
