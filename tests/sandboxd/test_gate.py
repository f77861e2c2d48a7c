"""The work of one turn of the event loop is bounded, and full garbage collections wait for a quiet moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sandboxd.backends.fake import FakeBackend, FakeScript
from sandboxd.clock import ManualClock
from sandboxd.collecting import LOOK_SECONDS, LOOKS, YOUNGER, collect_when_quiet, on_demand
from sandboxd.gate import PER_TURN, Gate
from sandboxd.journal import Entry, MemoryJournal
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.types import Template

from .conftest import settle

pytestmark = pytest.mark.anyio


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.now += 1
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def end(self) -> None:
        self._handle.cancel()


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    counted = Turns()
    yield counted
    counted.end()


async def test_a_few_pass_in_each_turn_first_come_first_served(turns: Turns) -> None:
    gate, order, passed = Gate(5), [], Counter[int]()

    async def come(number: int) -> None:
        await gate.passed()
        order.append(number)
        passed[turns.now] += 1

    await asyncio.gather(*(come(number) for number in range(103)))
    assert order == list(range(103))
    assert max(passed.values()) == 5
    # And in no turn were there fewer while others waited.
    assert len(passed) == 21
    # Once all have passed there is room again, and nothing is left to run.
    await settle()
    for _ in range(5):
        with pytest.raises(StopIteration):
            gate.passed().send(None)


async def test_who_leaves_takes_nobodys_turn(turns: Turns) -> None:
    gate = Gate(2)
    waiting = [asyncio.ensure_future(gate.passed()) for _ in range(40)]
    await asyncio.sleep(0)
    for one in waiting[2:38]:
        one.cancel()
    begin = turns.now
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not waiting[39].cancelled()
    assert turns.now - begin <= 4


class NotingJournal(MemoryJournal):
    """Notes in which turns of the event loop sandboxes become ready or leased."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns, self.kept = turns, Counter[int]()

    def keep(self, entry: Entry) -> None:
        super().keep(entry)
        self.kept[self.turns.now] += 1


async def test_starts_that_end_at_once_do_not_end_in_one_turn(clock: ManualClock, turns: Turns) -> None:
    count, journal = 200, NotingJournal(turns)
    bounds = Bounds(warm_target=0, size_limit=count, start_limit=count, waiting_limit=count)
    pool = Pool(
        "p",
        backend=FakeBackend(FakeScript(start_seconds=1.0), clock=clock),
        template=Template("p"),
        options=PoolOptions(bounds),
        clock=clock,
        journal=journal,
    )
    async with pool.run():
        callers = [asyncio.ensure_future(pool.acquire()) for _ in range(count)]
        await settle()
        clock.advance(1.0)
        async with asyncio.timeout(20):
            leased = await asyncio.gather(*callers)
        assert len({sandbox.id for sandbox in leased}) == count
    # One when it is ready, one when it is leased.
    assert sum(journal.kept.values()) == 2 * count
    assert max(journal.kept.values()) <= 2 * PER_TURN


@contextlib.asynccontextmanager
async def collecting(
    clock: ManualClock, quiet: Callable[[], bool], younger: Callable[[], int]
) -> AsyncIterator[list[float]]:
    collected: list[float] = []
    running = asyncio.ensure_future(
        collect_when_quiet(clock, quiet, lambda: collected.append(clock.now()), younger)
    )
    await settle()
    yield collected
    running.cancel()
    await asyncio.wait([running])


async def looks(clock: ManualClock, count: int) -> None:
    for _ in range(count):
        clock.advance(LOOK_SECONDS)
        await settle()


async def test_a_collection_waits_for_a_quiet_moment_but_not_for_ever(clock: ManualClock) -> None:
    state: dict[str, Any] = {"quiet": False, "younger": YOUNGER - 1}
    async with collecting(clock, lambda: state["quiet"], lambda: state["younger"]) as collected:
        await looks(clock, 2 * LOOKS)
        assert collected == [], "there is no reason"
        state["younger"] = YOUNGER
        await looks(clock, LOOKS - 1)
        assert collected == []
        await looks(clock, 1)
        assert len(collected) == 1
        await looks(clock, 3)
        state["quiet"] = True
        await looks(clock, 1)
        assert len(collected) == 2


def test_no_collection_is_full_unless_it_is_asked_for() -> None:
    before, full = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(info)

    with on_demand():
        gc.callbacks.append(note)
        try:
            kept = [[number] for number in range(300_000)]
            assert full == []
            gc.collect()
            assert len(full) == 1
        finally:
            gc.callbacks.remove(note)
    assert len(kept) == 300_000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
