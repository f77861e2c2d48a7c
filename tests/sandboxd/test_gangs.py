"""Gangs, priorities, tenants and positions, in a pool whose clock stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sandboxd import QueuePosition, errors
from sandboxd.backends.fake import FakeBackend, FakeScript
from sandboxd.clock import ManualClock
from sandboxd.journal import Entry, Past
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.queueing import Claim
from sandboxd.types import Template
from sandboxd.waiters import POSITIONS_PER_SECOND, Watch

from .conftest import settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]


def acquiring(pool: Pool, **claim: Any) -> asyncio.Task[Any]:
    """A call that waits for sandboxes of its own."""
    return asyncio.create_task(pool.acquire_all(Lease(), Claim(**claim)))


async def test_a_gang_comes_whole(rig: OpenRig) -> None:
    async with rig(script=FakeScript(start_seconds=1.0), starts=2, size=4) as r:
        gang = acquiring(r.pool, count=4)
        await r.advance(1.0)
        assert not gang.done()
        assert "2 warm, 0 active" in r.counts
        await r.advance(1.0)
        sandboxes = await gang
        assert len({sandbox.id for sandbox in sandboxes}) == 4
        assert r.pool.stats().acquired_total == 4
        r.pool.release(sandboxes[0].id)
        await settle()
        assert "3 active" in r.counts


async def test_a_gang_that_can_never_be_met_is_refused_at_once_and_when_the_pool_shrinks(
    rig: OpenRig,
) -> None:
    async with rig(size=4) as r:
        held = await r.pool.acquire()
        with pytest.raises(errors.InvalidRequest, match=r"5 sandboxes at once are more than .* of 4"):
            await r.pool.acquire_all(Lease(), Claim(count=5))
        gang, single = acquiring(r.pool, count=4), acquiring(r.pool)
        await settle()
        assert not single.done()
        r.pool.resize(size_limit=3)
        with pytest.raises(errors.InvalidRequest, match="size_limit of 3"):
            await gang
        await single
        assert r.pool.get(held.id) is held


async def test_what_gathers_for_a_gang_goes_back_when_it_leaves(rig: OpenRig) -> None:
    async with rig(size=3) as r:
        held = await r.pool.acquire()
        late = asyncio.create_task(r.pool.acquire_all(Lease(), Claim(count=3), timeout=5.0))
        behind = acquiring(r.pool, tenant="other")
        await settle()
        assert "2 warm, 1 active, 0 deleting, 2 waiting" in r.counts
        await r.advance(5.0)
        with pytest.raises(errors.AcquireTimedOut, match="0 callers ahead"):
            await late
        await behind
        assert "0 warm, 2 active, 0 deleting, 0 waiting" in r.counts
        gang = acquiring(r.pool, count=2)
        await settle()
        gang.cancel()
        behind = acquiring(r.pool)
        await settle()
        await behind
        r.pool.release(held.id)


async def test_gangs_of_two_callers_do_not_deadlock(rig: OpenRig) -> None:
    """Each wants more than half: if each held what it had, neither would ever be served."""
    async with rig(size=5, script=FakeScript(start_seconds=1.0)) as r:
        gangs = [acquiring(r.pool, count=3, tenant=tenant) for tenant in "abcd"]
        for gang in gangs:
            await r.advance(1.0)
            for sandbox in await gang:
                r.pool.release(sandbox.id)
            await settle()
        assert r.pool.stats().released_total == 12


async def test_a_start_that_fails_for_good_is_heard_by_the_head(rig: OpenRig) -> None:
    script = FakeScript(first_failures=[errors.StartFailed("no such image", retryable=False)])
    async with rig(script=script, starts=1) as r:
        gang = acquiring(r.pool, count=2)
        with pytest.raises(errors.StartFailed, match="no such image"):
            await gang


async def test_a_member_that_dies_before_its_caller_wakes_ends_the_gang(rig: OpenRig) -> None:
    async with rig(script=FakeScript(start_seconds=1.0)) as r:
        gang = acquiring(r.pool, count=3)
        await settle()
        r.clock.advance(1.0)
        while not r.pool.stats().active:
            await asyncio.sleep(0)
        r.backend.kill(r.pool.sandboxes()[1].id)
        await settle()
        # Its caller woke first and then the sandbox died, or the other way round: never a part in silence.
        try:
            sandboxes = await gang
        except errors.SandboxLost:
            assert "0 active" in r.counts
        else:
            with pytest.raises(errors.SandboxLost):
                for sandbox in sandboxes:
                    r.pool.get(sandbox.id)


async def test_one_request_id_is_one_gang(rig: OpenRig) -> None:
    async with rig() as r:
        lease, claim = Lease(request_id="g"), Claim(count=3)
        both = await asyncio.gather(*(r.pool.acquire_all(lease, claim) for _ in range(2)))
        assert both[0] == both[1]
        assert r.pool.stats().acquired_total == 3
        with pytest.raises(errors.InvalidRequest, match="was given 3 sandboxes and now asks for 1"):
            await r.pool.acquire(lease)
        r.pool.release(both[0][0].id)
        with pytest.raises(errors.SandboxNotFound, match="was released"):
            await r.pool.acquire_all(lease, claim)
        r.pool.release_request("g")
        await settle()
        assert "0 active" in r.counts
        again = await r.pool.acquire_all(lease, claim)
        assert not {sandbox.id for sandbox in again} & {sandbox.id for sandbox in both[0]}


async def test_a_request_of_an_earlier_daemon_is_known_with_what_was_lost_of_it(clock: ManualClock) -> None:
    backend, template, lease = FakeBackend(clock=clock), Template("p"), Lease(request_id="g")
    entries = [
        Entry(f"p-{name}", 0.0, template.digest, expiry=9.0, ttl=9.0, request_id=request_id, gang=gang)
        for name, request_id, gang in [("1", "g", 2), ("2", "g", 2), ("3", "h", 2), ("4", "i", 1)]
    ]
    left = {name: await backend.create(name, template) for name in ("p-1", "p-3")}
    options = PoolOptions(Bounds(0, 10, 10, 10))
    pool = Pool("p", backend=backend, template=template, options=options, clock=clock)
    pool.restore(Past(entries), left)
    async with pool.run():
        with pytest.raises(errors.SandboxLost, match="died while no daemon ran"):
            await pool.acquire_all(lease, Claim(count=2))
        with pytest.raises(errors.InvalidRequest, match="was given 2 sandboxes and now asks for 1"):
            await pool.acquire(lease)
        with pytest.raises(errors.SandboxNotFound, match=r"of the 2 sandboxes .* 1 were released"):
            await pool.acquire_all(Lease(request_id="h"), Claim(count=2))
        assert (await pool.acquire(Lease(request_id="i"))).id != "p-4"
        pool.release_request("g")
        assert len(await pool.acquire_all(lease, Claim(count=2))) == 2


async def test_priorities_and_shares_decide_who_is_served(rig: OpenRig) -> None:
    async with rig(size=1, weights={"b": 2}) as r:
        order: list[str] = []

        async def one(name: str, **claim: Any) -> None:
            sandbox = (await r.pool.acquire_all(Lease(), Claim(**claim)))[0]
            order.append(name)
            r.pool.release(sandbox.id)

        held = await r.pool.acquire()
        calls = [one(f"a{n}", tenant="a") for n in range(3)] + [one(f"b{n}", tenant="b") for n in range(4)]
        calls += [one("low", priority=-1), one("high", priority=1)]
        tasks = [asyncio.create_task(call) for call in calls]
        await settle()
        r.pool.release(held.id)
        await asyncio.gather(*tasks)
        assert order == ["high", "a0", "b0", "b1", "a1", "b2", "b3", "a2", "low"]


async def test_a_full_queue_lets_in_who_goes_before_others(rig: OpenRig) -> None:
    async with rig(size=1, waiting=2) as r:
        held = await r.pool.acquire()
        greedy = [acquiring(r.pool, tenant="greedy") for _ in range(2)]
        await settle()
        with pytest.raises(errors.QueueFull) as raised:
            await acquiring(r.pool, tenant="greedy")
        assert (raised.value.metadata["position"], raised.value.retry_after) == ("2", 1.0)
        modest = acquiring(r.pool, tenant="modest")
        with pytest.raises(errors.QueueFull):
            await greedy[1]
        r.pool.release(held.id)
        r.pool.release((await greedy[0])[0].id)
        await modest


async def test_a_waiter_hears_its_position_and_when_it_may_come(rig: OpenRig) -> None:
    async with rig(size=1, warm=1) as r:
        heard: list[QueuePosition] = []

        async def told(position: QueuePosition) -> None:
            heard.append(position)

        held = await r.pool.acquire()
        ahead = [acquiring(r.pool) for _ in range(3)]
        await settle()
        watched = asyncio.create_task(r.pool.acquire_all(Lease(), Claim(), watch=Watch(1.0, told)))
        await settle()
        assert heard == [QueuePosition(3, 3, None)]
        for waiter in ahead:
            await r.advance(2.0)
            r.pool.release(held.id)
            held = (await waiter)[0]
        await r.advance(2.0)
        assert [position.callers_ahead for position in heard] == [3, 3, 2, 1, 0]
        assert heard[-1].expected_wait == pytest.approx(8 / 3, rel=0.01)
        r.pool.release(held.id)
        await watched
        await r.advance(5.0)
        assert len(heard) == 5


async def test_many_who_watch_hear_less_often(rig: OpenRig) -> None:
    async with rig(size=1, waiting=5000) as r:
        told = 0

        async def count(_: QueuePosition) -> None:
            nonlocal told
            told += 1

        await r.pool.acquire()
        watchers = int(4 * POSITIONS_PER_SECOND)
        watch = Watch(0.5, count)
        waiting = [
            asyncio.create_task(r.pool.acquire_all(Lease(), Claim(), watch=watch)) for _ in range(watchers)
        ]
        await settle()
        assert told == watchers
        await r.advance(3.0)
        assert told < 2 * watchers
        for waiter in waiting:
            waiter.cancel()
        await settle()
        assert "0 waiting" in r.counts


async def test_a_refused_waiter_is_told_when_it_would_have_been_served(rig: OpenRig) -> None:
    async with rig(size=1, waiting=20) as r:
        held = await r.pool.acquire()
        waiting = [acquiring(r.pool) for _ in range(21)]
        await settle()
        with pytest.raises(errors.QueueFull):
            await waiting.pop()
        for _ in range(10):
            await r.advance(1.0)
            r.pool.release(held.id)
            held = (await waiting.pop(0))[0]
            waiting.append(acquiring(r.pool))
            await settle()
        with pytest.raises(errors.QueueFull) as raised:
            await r.pool.acquire()
        assert raised.value.retry_after == pytest.approx(20.0, rel=0.1)
        for waiter in waiting:
            waiter.cancel()


async def test_a_repeated_request_is_given_the_same_forks(rig: OpenRig) -> None:
    async with rig() as r:
        source = await r.pool.acquire()
        asked = Lease(request_id="twice")
        first, second = await asyncio.gather(*(r.pool.fork(source.id, 2, asked) for _ in range(2)))
        assert [fork.id for fork in first] == [fork.id for fork in second]
        assert "3 active" in r.counts
        r.pool.release_request("twice")
        await settle()
        assert "1 active" in r.counts
