"""What a daemon makes of what a killed one left on its host."""

from __future__ import annotations

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
from sandboxd.journal import JournalFile
from sandboxd.types import Template
from sandboxd.upkeep import Surroundings, Upkeep

from .conftest import settle

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def upkeep_on(
    backend: FakeBackend, path: Path, clock: ManualClock, facts: Facts
) -> AsyncIterator[Upkeep]:
    """One pool of up to 100, on a backend that is there already."""
    pools = {"p": {"backend": "fake", "warm": 0, "size_limit": 100}}
    config = Config.model_validate({"state_dir": path, "images_dir": path, "pools": pools})
    async with BackendSet(config, clock, lambda _kind, _config: backend) as backends:
        await backends.open_for(config)
        with JournalFile(path / "journal.sqlite3", clock).open() as journal:
            upkeep = Upkeep(config, Surroundings(backends, journal, facts, clock))
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
