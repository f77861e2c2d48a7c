"""The group buffer: slots, batches, and what a resumed run must play again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rl.buffer import GroupBuffer
from rl.errors import Exhausted
from rl.policies import Windowed
from rl.staleness import Slots
from rl.types import Episode, Group, Scored, StopReason, Task, Turn, VersionSpan


def task(name: str) -> Task:
    return Task(name, "sums", 0, "q", "a")


def group(name: str, version: int = 0) -> Group:
    none = np.zeros(0, np.int32)
    one = Turn(np.array([1], np.int32), np.zeros(1, np.float32), (VersionSpan(version, 0, 1),), none)
    episode = Episode(task(name), (one,), Scored(1.0), StopReason.COMPLETED)
    return Group(task(name), np.array([9], np.int32), (episode,))


def filled(policy: Windowed, *names: str) -> GroupBuffer:
    buffer = GroupBuffer(policy)
    for name in names:
        buffer.finish(buffer.claim(task(name), 0), group(name))
    return buffer


def test_a_slot_stays_taken_until_the_weights_are_live() -> None:
    async def body() -> None:
        buffer = filled(Windowed(Slots(0, 2)), "a", "b")
        with pytest.raises(RuntimeError, match="2 ready"):
            buffer.claim(task("c"), 0)
        taken = await buffer.take(0)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(buffer.admitted())
            await asyncio.sleep(0)
            buffer.mark_trained(ready.ticket for ready in taken.batch)
            await asyncio.sleep(0)
            assert not waiting.done()
            buffer.release()
        assert buffer.outstanding == 0

    asyncio.run(body())


def test_a_dropped_group_frees_its_slot_at_once() -> None:
    async def body() -> None:
        buffer = GroupBuffer(Windowed(Slots(0, 1)))
        ticket = buffer.claim(task("a"), 0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(buffer.admitted())
            await asyncio.sleep(0)
            buffer.drop(ticket, "zero_advantage")
        assert buffer.dropped == {"zero_advantage": 1}
        with pytest.raises(KeyError):
            buffer.drop(ticket, "again")

    asyncio.run(body())


def test_take_wakes_when_a_batch_is_complete() -> None:
    async def body() -> None:
        buffer = GroupBuffer(Windowed(Slots(1, 2)))
        first, second = buffer.claim(task("a"), 0), buffer.claim(task("b"), 0)
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(buffer.take(0))
            buffer.finish(second, group("b"))
            await asyncio.sleep(0)
            assert not taking.done()
            buffer.finish(first, group("a"))
        assert [ready.group.task.key for ready in taking.result().batch] == ["a", "b"]

    asyncio.run(body())


def test_what_is_too_old_is_returned_and_not_trained() -> None:
    async def body() -> None:
        buffer = filled(Windowed(Slots(1, 1)), "old")
        buffer.finish(buffer.claim(task("new"), 2), group("new", version=2))
        taken = await buffer.take(2)
        assert [ready.group.task.key for ready in taken.stale] == ["old"]
        assert [ready.group.task.key for ready in taken.batch] == ["new"]
        assert buffer.dropped == {"stale": 1}

    asyncio.run(body())


def test_what_is_too_old_is_not_lost_by_a_wait_that_is_broken_off() -> None:
    """As at a run's end: it is still to be played again, or the next one to take hears of it."""

    async def body() -> None:
        buffer = filled(Windowed(Slots(1, 1)), "old")
        taking = asyncio.create_task(buffer.take(2))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        assert (buffer.dropped, [t.key for t in buffer.unsettled()]) == ({"stale": 1}, ["old"])
        buffer.finish(buffer.claim(task("new"), 2), group("new", version=2))
        taken = await buffer.take(2)
        assert [ready.group.task.key for ready in taken.stale] == ["old"]
        assert [t.key for t in buffer.unsettled()] == ["new"]

    asyncio.run(body())


def test_unsettled_tasks_are_those_neither_trained_nor_dropped() -> None:
    async def body() -> None:
        buffer = filled(Windowed(Slots(3, 1)), "a", "b", "c")
        buffer.claim(task("d"), 0)
        taken = await GroupBuffer.take(buffer, 0)
        assert [t.key for t in buffer.unsettled()] == ["a", "b", "c", "d"]
        assert [t.key for t in buffer.unsettled(training=False)] == ["b", "c", "d"]
        buffer.mark_trained(ready.ticket for ready in taken.batch)
        assert [t.key for t in buffer.unsettled()] == ["b", "c", "d"]
        assert repr(buffer) == "<GroupBuffer 1 running, 2 ready, 0 training, 1 trained>"

    asyncio.run(body())


def test_a_closed_buffer_gives_its_last_batches_and_then_says_so() -> None:
    async def body() -> None:
        buffer = filled(Windowed(Slots(2, 2)), "a", "b", "c")
        buffer.close()
        assert len((await buffer.take(0)).batch) == 2
        with pytest.raises(Exhausted, match="1 ready"):
            await buffer.take(1)

    asyncio.run(body())
