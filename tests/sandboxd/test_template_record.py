"""What the journal keeps of a template: the same again, of journals old and new."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd import template_record
from sandboxd.backends.fake import FakeBackend
from sandboxd.clock import ManualClock
from sandboxd.journal import Entry
from sandboxd.journal_file import JournalFile
from sandboxd.ledger import Bounds, Totals
from sandboxd.pool import Pool, PoolOptions
from sandboxd.recovery import recover
from sandboxd.types import Limits, Network, Template

pytestmark = pytest.mark.anyio

WORDS = st.binary(max_size=20)
AMOUNTS = st.none() | st.integers(0, 1 << 62)
LIMITS = st.builds(
    Limits,
    memory_bytes=AMOUNTS,
    cpu_count=st.none() | st.floats(0.01, 1e3),
    pids=AMOUNTS,
    open_files=AMOUNTS,
    disk_bytes=AMOUNTS,
)
TEMPLATES = st.builds(
    Template,
    name=st.text(max_size=9),
    image=st.none() | st.text(max_size=9),
    env=st.dictionaries(WORDS, WORDS, max_size=4),
    cwd=WORDS,
    setup=st.lists(WORDS, max_size=3).map(tuple),
    limits=LIMITS,
    network=st.sampled_from(Network),
    runtime=st.none() | st.text(max_size=9),
    start_timeout=st.floats(0.0, 1e9),
    pull_timeout=st.floats(0.0, 1e9),
    users=st.booleans(),
    branches=st.lists(st.text(max_size=9), max_size=3).map(tuple),
)


@given(TEMPLATES)
def test_a_template_comes_out_as_it_went_in(template: Template) -> None:
    again = template_record.load(template_record.dump(template))
    assert again == template
    assert again.digest == template.digest


def test_what_a_newer_daemon_adds_is_left_out() -> None:
    template = Template("p", env={b"A": b"\xff"})
    values = json.loads(template_record.dump(template))
    newer = {**values, "colour": "red", "limits": {**values["limits"], "gpus": 8}}
    assert template_record.load(json.dumps(newer)) == template


def entry(name: str, template: Template, expiry: float = 900.0) -> Entry:
    return Entry(name, 0.0, template.digest, expiry=expiry, ttl=60.0, origin=template)


def rows(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return [digest for (digest,) in db.execute("SELECT digest FROM templates ORDER BY digest")]


def test_each_is_kept_once_and_those_without_a_sandbox_are_forgotten(tmp_path: Path) -> None:
    path, kinds = tmp_path / "journal.sqlite3", [Template("p", env={b"N": b"%d" % n}) for n in range(3)]
    with JournalFile(path).open() as file:
        one, other = file.pool("p"), file.pool("q")
        for number in range(4):
            one.keep(entry(f"p-{number}", kinds[0]))
            other.keep(entry(f"q-{number}", kinds[0]))
        one.commit(Totals())
        other.commit(Totals())
        assert rows(path) == [kinds[0].digest] * 2
        one.keep(entry("p-new", kinds[1]))
        one.commit(Totals())
        for number in range(4):
            one.forget(f"p-{number}")
        one.keep(entry("p-newest", kinds[2]))
        one.commit(Totals())
    with JournalFile(path).open() as file:
        assert [kept.origin for kept in file.past("p").entries] == kinds[1:]
        assert {kept.origin for kept in file.past("q").entries if kept.origin != kinds[0]} == set()
        assert len(rows(path)) == 3
        file.keep_only({"q"})
        assert rows(path) == [kinds[0].digest]


@pytest.mark.parametrize("old", [False, True])
async def test_a_lease_goes_on_with_its_template_where_the_journal_says_which(
    tmp_path: Path, clock: ManualClock, old: bool
) -> None:
    """An older daemon's journal does not: there it is the one that the settings say now."""
    path, backend = tmp_path / "journal.sqlite3", FakeBackend(clock=clock)
    before, after = Template("p", env={b"A": b"before"}), Template("p", env={b"A": b"after"})
    await backend.create("p-held", before)
    with JournalFile(path).open() as file:
        journal = file.pool("p")
        journal.keep(entry("p-held", before))
        journal.commit(Totals(acquired=1))
    if old:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE templates")
    bounds = Bounds(warm_target=0, size_limit=9, start_limit=9, waiting_limit=9)
    with JournalFile(path).open() as file:
        journal = file.pool("p")
        pool = Pool(
            "p",
            backend=backend,
            template=after,
            options=PoolOptions(bounds),
            clock=clock,
            journal=journal,
        )
        assert await recover(pool, backend, journal, {"p-held"}) == {"p-held"}
        async with pool.run():
            pool.renew("p-held")
            (kept,) = journal.past().entries
            assert kept.origin == (None if old else before)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "p", "env": [], "cwd": "", "setup": []}'])
def test_a_template_that_is_none_begins_the_journal_anew(tmp_path: Path, text: str) -> None:
    path, template = tmp_path / "journal.sqlite3", Template("p")
    with JournalFile(path).open() as file:
        journal = file.pool("p")
        journal.keep(entry("p-1", template))
        journal.commit(Totals())
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE templates SET template = ?", (text,))
        db.commit()
    with JournalFile(path).open() as file:
        assert file.past("p").entries == []
