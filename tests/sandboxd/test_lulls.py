"""Plans that nobody waits for are made in a lull: not between the grants of a burst, and not never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sandboxd.alarm import Lull, Together
from sandboxd.errors import QueueFull
from sandboxd.leases import Lease
from sandboxd.queueing import Claim

from .conftest import settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]


async def test_it_rings_once_for_all_that_came_before() -> None:
    rung, times = asyncio.Event(), 0

    def ring() -> None:
        nonlocal times
        times += 1
        rung.set()

    lull = Lull(ring, quiet=0.001, longest=100.0)
    for _ in range(5):
        lull.set()
    async with asyncio.timeout(20):
        await rung.wait()
        rung.clear()
        lull.set()
        await rung.wait()
    assert times == 2


async def test_one_act_serves_all_who_asked_in_a_turn_and_not_who_left() -> None:
    acts: list[int] = []
    together = Together(lambda: acts.append(1))
    first, second, left = together.done(), together.done(), together.done()
    left.cancel()
    assert acts == []
    await asyncio.gather(first, second)
    await together.done()
    assert acts == [1, 1]


async def test_a_crowd_is_served_together_and_a_few_are_not_kept_waiting() -> None:
    acts: list[int] = []
    together = Together(lambda: acts.append(1), apart=1000.0, crowd=3)
    async with asyncio.timeout(20):
        for _ in range(3):
            await together.done()
    assert acts == [1, 1, 1]
    crowd = together.done(), together.done()
    await settle()
    assert not any(each.done() for each in crowd)
    # What has been done at once for another reason is done for them, too.
    together.now()
    await asyncio.gather(*crowd)
    assert acts == [1, 1, 1, 1]


async def test_a_crowd_waits_no_longer_than_it_must() -> None:
    acts: list[int] = []
    together = Together(lambda: acts.append(1), apart=0.02)
    async with asyncio.timeout(20):
        await together.done()
        await asyncio.gather(*(together.done() for _ in range(100)))
    assert acts == [1, 1]


async def test_an_act_that_fails_fails_for_all_who_asked() -> None:
    """And for the loop, which tells of it."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda *_: told.set())

    def fail() -> None:
        raise KeyError

    together = Together(fail)
    asked = together.done(), together.done()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in found] == [KeyError, KeyError]
    assert told.is_set()


async def test_what_never_pauses_does_not_put_it_off_for_ever() -> None:
    rung = asyncio.Event()
    lull = Lull(rung.set, quiet=0.02, longest=0.1)
    async with asyncio.timeout(20):
        while not rung.is_set():
            lull.set()
            await asyncio.sleep(0)


async def test_what_was_cancelled_does_not_ring() -> None:
    rung: list[int] = []
    other = asyncio.Event()
    lull = Lull(lambda: rung.append(1), quiet=0.001, longest=100.0)
    lull.set()
    lull.cancel()
    later = Lull(other.set, quiet=0.01, longest=100.0)
    later.set()
    async with asyncio.timeout(20):
        await other.wait()
    assert rung == []


async def test_a_burst_from_a_full_pool_is_served_before_what_takes_its_place(rig: OpenRig) -> None:
    async with rig(warm=8) as r:
        for _ in range(6):
            await r.pool.acquire()
        assert "0 starting" in r.counts
        assert "2 warm, 6 active" in r.counts
        await r.until(lambda: "8 warm, 6 active" in r.counts)


async def test_what_is_nearly_empty_is_filled_while_calls_come(rig: OpenRig) -> None:
    async with rig(warm=8) as r:
        for _ in range(7):
            await r.pool.acquire()
        await settle()
        assert "1 warm, 7 active" not in r.counts
        await r.until(lambda: "8 warm, 7 active" in r.counts)


async def test_nobody_passes_one_who_waits(rig: OpenRig) -> None:
    """Behind a gang that does not fit, a sandbox that is ready is not granted at once."""
    async with rig(warm=2, size=4) as r:
        held = await r.pool.acquire_all(Lease(), Claim(2))
        await r.until(lambda: "2 warm, 2 active" in r.counts)
        gang = asyncio.ensure_future(r.pool.acquire_all(Lease(), Claim(4), timeout=60))
        await settle()
        one = asyncio.ensure_future(r.pool.acquire(timeout=60))
        await settle()
        assert "2 warm, 2 active, 0 deleting, 2 waiting" in r.counts
        assert not one.done()
        for sandbox in held:
            r.pool.release(sandbox.id)
        async with asyncio.timeout(20):
            assert len(await gang) == 4
        assert not one.done()
        one.cancel()
        await asyncio.wait([one])


async def test_where_nobody_may_wait_who_need_not_is_served(rig: OpenRig) -> None:
    async with rig(warm=1, size=1, waiting=0) as r:
        await r.pool.acquire()
        with pytest.raises(QueueFull):
            await r.pool.acquire()
