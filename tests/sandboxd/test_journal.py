"""A journal that cannot be written: the next daemon must not believe it, and it must not grow meanwhile."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.backends.fake import FakeBackend
from sandboxd.clock import ManualClock
from sandboxd.journal import Ending, Entry
from sandboxd.journal_file import AGAIN_SECONDS, JournalFile
from sandboxd.ledger import Bounds, Totals
from sandboxd.pool import Pool, PoolOptions
from sandboxd.recovery import recover
from sandboxd.types import Template

from .conftest import settle

pytestmark = pytest.mark.anyio


@contextlib.contextmanager
def no_room(journal: Path) -> Iterator[None]:
    """Files cannot grow, by a limit of this process: the log of the journal needs that for every change."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = journal.with_name(f"{journal.name}-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def entry(name: str, expiry: float | None = None) -> Entry:
    return Entry(name, 0.0, "digest", expiry=expiry)


def found(path: Path, pool: str = "p") -> list[Entry]:
    """What the next daemon would find."""
    with JournalFile(path).open() as file:
        return file.past(pool).entries


async def test_one_sandbox_has_no_two_holders_after_a_kill_on_a_full_disk(
    tmp_path: Path, clock: ManualClock
) -> None:
    path, backend, template = tmp_path / "journal.sqlite3", FakeBackend(clock=clock), Template("p")

    def pool(file: JournalFile) -> Pool:
        bounds = Bounds(warm_target=1, size_limit=4, start_limit=4, waiting_limit=9)
        options = PoolOptions(bounds)
        journal = file.pool("p")
        return Pool("p", backend=backend, template=template, options=options, clock=clock, journal=journal)

    with JournalFile(path, clock).open() as file:
        first = pool(file)
        async with first.run():
            await settle()
            with no_room(path):
                held = await first.acquire()
                await settle()
            there = set(await backend.list_ids())
            assert held.id in there
            # Here it is killed.
            with JournalFile(path, clock).open() as next_file:
                assert await recover(pool(next_file), backend, next_file.pool("p"), there) == set()


def test_all_is_written_once_there_is_room_again(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "journal.sqlite3"
    with JournalFile(path, clock).open() as file:
        one, other = file.pool("p"), file.pool("q")
        one.keep(entry("warm"))
        one.keep(entry("destroyed"))
        one.commit(Totals())
        other.keep(entry("another's"))
        other.commit(Totals())
        with no_room(path):
            one.keep(entry("warm", expiry=9.0))
            one.forget("destroyed")
            one.ended(Ending("destroyed", "SANDBOX_LOST", "it died"))
            one.commit(Totals(acquired=1))
            assert file.void
        # Another pool's change has all of them written, but not at once.
        other.keep(entry("new"))
        other.commit(Totals())
        assert file.void
        clock.advance(AGAIN_SECONDS)
        other.commit(Totals())
        assert not file.void
    with JournalFile(path).open() as file:
        past = file.past("p")
        assert past.entries == [entry("warm", expiry=9.0)]
        assert [ending.id for ending in past.endings] == ["destroyed"]
        assert past.totals.acquired == 1
        assert [kept.id for kept in file.past("q").entries] == ["another's", "new"]


def test_what_comes_and_goes_meanwhile_is_not_kept(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "journal.sqlite3"
    with JournalFile(path, clock).open() as file:
        one = file.pool("p")
        one.keep(entry("first"))
        one.commit(Totals())
        with no_room(path):
            for number in range(1000):
                one.keep(entry(f"p-{number}"))
                one.commit(Totals())
                one.forget(f"p-{number}")
                one.commit(Totals())
            assert file.void
            assert len(one.changes()) + len(one.everything()) < 10
    assert found(path) == []
