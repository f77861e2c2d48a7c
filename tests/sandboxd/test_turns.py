"""Forks that wait for starting slots: in order, and none is lost to one that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sandboxd.alarm import Alarm
from sandboxd.clock import ManualClock
from sandboxd.pacing import Bucket, Pace
from sandboxd.slots import Slots
from sandboxd.turns import Turns

from .conftest import settle

pytestmark = pytest.mark.anyio


class Line:
    """Those who take turns; each holds its slot until it is told to end."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.holding: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def join(self, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(name))
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await settle()

    async def _hold(self, name: str) -> None:
        async with self._turns.one():
            self.holding.append(name)
            await self._ends[name].wait()
            self.holding.remove(name)


def line(clock: ManualClock, *, limit: int = 2, at_once: int = 10, bucket: Bucket | None = None) -> Line:
    slots = Slots(Pace(floor=limit, ceiling=limit))
    return Line(Turns(slots, bucket or Bucket(), clock, lambda: at_once))


async def test_turns_come_in_the_order_of_arrival(clock: ManualClock) -> None:
    those = line(clock)
    await those.join("a", "b", "c", "d")
    assert those.holding == ["a", "b"]
    await those.end("a")
    assert those.holding == ["b", "c"]
    await those.end("b", "c", "d")
    assert those.holding == []


async def test_a_pools_forks_have_a_bound_of_their_own(clock: ManualClock) -> None:
    those = line(clock, limit=8, at_once=3)
    await those.join(*"abcde")
    assert those.holding == ["a", "b", "c"]
    await those.end(*"abcde")


async def cancelled_while_it_waits(those: Line) -> None:
    those.tasks["c"].cancel()
    await settle()


async def cancelled_as_it_is_served(those: Line) -> None:
    await those.join()
    those._ends["a"].set()
    while "a" in those.holding:
        await asyncio.sleep(0)
    those.tasks["c"].cancel()
    await settle()


@pytest.mark.parametrize("leaves", [cancelled_while_it_waits, cancelled_as_it_is_served])
async def test_who_leaves_takes_no_slot_along(
    clock: ManualClock, leaves: Callable[[Line], Awaitable[None]]
) -> None:
    those = line(clock)
    await those.join("a", "b", "c", "d", "e")
    await leaves(those)
    await those.end("a", "b")
    assert those.holding == ["d", "e"]
    await those.end("d", "e")
    await those.join("f", "g")
    assert those.holding == ["f", "g"]
    await those.end("f", "g")


async def test_the_rate_holds_for_them_too(clock: ManualClock) -> None:
    those = line(clock, limit=8, bucket=Bucket(1.0))
    await those.join("a", "b", "c")
    assert those.holding == ["a"]
    clock.advance(1.0)
    await settle()
    assert those.holding == ["a", "b"]
    clock.advance(1.0)
    await settle()
    assert those.holding == ["a", "b", "c"]
    await those.end("a", "b", "c")


async def test_who_waits_for_a_token_keeps_nobody_from_a_slot(clock: ManualClock) -> None:
    slots = Slots(Pace(floor=3, ceiling=3))
    those, others = Line(Turns(slots, Bucket(1.0), clock, lambda: 10)), slots.share(lambda: None)
    await those.join("a", "b", "c")
    assert (those.holding, slots.free, others.room) == (["a"], 2, 2)
    others.hold(2, wants=0)
    clock.advance(5.0)
    await settle()
    # Now it has its token and waits for a slot, which is the other's.
    assert those.holding == ["a"]
    others.hold(0, wants=0)
    await settle()
    assert "b" in those.holding
    await those.end("a", "b", "c")


async def test_who_leaves_before_its_token_came_keeps_nobody_waiting(clock: ManualClock) -> None:
    those = line(clock, limit=8, bucket=Bucket(1.0))
    await those.join("a", "b", "c")
    those.tasks["b"].cancel()
    for _ in range(2):
        await settle()
        clock.advance(1.0)
    await settle()
    assert those.holding == ["a", "c"]
    await those.end("a", "c")


async def test_a_bound_that_was_changed_holds_for_who_waits(clock: ManualClock) -> None:
    bound = [1]
    those = Line(Turns(Slots(Pace(floor=8, ceiling=8)), Bucket(), clock, lambda: bound[0]))
    await those.join("a", "b", "c", "d")
    assert those.holding == ["a"]
    bound[0] = 2
    await those.end("a")
    assert those.holding == ["b", "c"]
    await those.end("b", "c", "d")


async def test_an_alarm_rings_at_the_earliest_time_asked_for(clock: ManualClock) -> None:
    rung: list[float] = []
    alarm = Alarm(clock, lambda: rung.append(clock.now()))
    async with asyncio.TaskGroup() as tasks:
        for at in (5.0, 3.0, 9.0):
            alarm.set(at, tasks)
        for _ in range(4):
            await settle()
            clock.advance(1.0)
        await settle()
        alarm.set(6.0, tasks)
        alarm.cancel()
        clock.advance(100.0)
    assert rung == [3.0]
