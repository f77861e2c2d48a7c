"""Gangs, priorities, tenants and positions: in a pool whose clock stands still, and through the real door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from sandboxd import Box, Client, QueuePosition, errors
from sandboxd.backends.fake import FakeBackend, FakeScript
from sandboxd.clock import ManualClock
from sandboxd.journal import Entry, Past
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.queueing import Claim
from sandboxd.types import Template
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc
from sandboxd.waiters import POSITIONS_PER_SECOND, Watch

from .conftest import settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]
OpenDaemon = Callable[..., Any]


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


POOLS = {"p": {"backend": "fake", "warm": 0, "size_limit": 4, "waiting_limit": 3}}


async def test_a_gang_through_the_door(daemon: OpenDaemon) -> None:
    async with daemon(pools=POOLS) as client:
        async with client.acquire_gang("p", 4, timeout=10, labels={"group": "7"}) as boxes:
            done = await asyncio.gather(*(box.exec(["echo", "hi"]) for box in boxes))
            assert [result.stdout for result in done] == [b"hi\n"] * 4
            listed = [info async for info in client.list_sandboxes("p") if info.state == "ACTIVE"]
            assert [info.labels for info in listed] == [{"group": "7"}] * 4
        assert (await client.get_pool("p")).released_total == 4
        same = [await client.acquire_gang("p", 2, request_id="g", timeout=10) for _ in range(2)]
        assert {box.name for box in same[0]} == {box.name for box in same[1]}


async def test_a_caller_is_told_while_it_waits_and_leaves_nothing(daemon: OpenDaemon) -> None:
    async with daemon(pools=POOLS) as client:
        heard: asyncio.Queue[QueuePosition] = asyncio.Queue()
        boxes = await client.acquire_gang("p", 4, timeout=10)
        waiting = asyncio.ensure_future(leased(client, heard.put_nowait, timeout=60))
        async with asyncio.timeout(10):
            assert await heard.get() == QueuePosition(0, 0, None)
            behind = asyncio.ensure_future(leased(client, heard.put_nowait, priority=-3, timeout=60))
            while (await heard.get()).callers_ahead == 0:
                pass
        await boxes[0].release()
        await (await waiting).release()
        await (await behind).release()
        assert (await client.get_pool("p")).waiting == 0


async def leased(client: Client, on_wait: Callable[[QueuePosition], object], **options: Any) -> Box:
    return await client.acquire("p", on_wait=on_wait, **options)


async def test_what_a_callers_own_function_raises_ends_its_call(daemon: OpenDaemon) -> None:
    def refuse(position: QueuePosition) -> None:
        raise KeyError(position.callers_ahead)

    async with daemon(pools=POOLS) as client:
        boxes = await client.acquire_gang("p", 4, timeout=10)
        with pytest.raises(KeyError):
            await client.acquire("p", on_wait=refuse, timeout=60)
        async with asyncio.timeout(10):
            while (await client.get_pool("p")).waiting:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(box.release() for box in boxes))


async def test_a_full_queue_and_a_deadline_say_the_position_on_the_wire(daemon: OpenDaemon) -> None:
    async with daemon(pools=POOLS) as client, client.acquire_gang("p", 4, timeout=10):
        waiting = [asyncio.ensure_future(leased(client, lambda _: None, timeout=2.0)) for _ in range(3)]
        async with asyncio.timeout(10):
            while (await client.get_pool("p")).waiting < 3:
                await asyncio.sleep(0.01)
        with pytest.raises(errors.QueueFull) as raised:
            await client.acquire("p", timeout=10)
        assert raised.value.metadata["position"] == "3"
        assert raised.value.retry_after == pytest.approx(1.0)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(error) for error in ended} == {errors.AcquireTimedOut}
        assert all(
            "position" in error.metadata for error in ended if isinstance(error, errors.AcquireTimedOut)
        )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.AcquireSandboxesRequest(count=0), "count = 0 must be from 1 to 1000"),
        (pb.AcquireSandboxesRequest(count=5), "more than the pool's size_limit of 4"),
        (pb.AcquireSandboxesRequest(count=1, priority=11), "priority = 11 must be from -10 to 10"),
        (pb.AcquireSandboxesRequest(count=1, tenant="A b"), "tenant 'A b' must be a lower-case letter"),
        (pb.AcquireSandboxesRequest(count=1, position_interval={"nanos": 1000}), "must be at least 0.1 s"),
    ],
)
async def test_bad_claims_are_refused_in_words(
    daemon: OpenDaemon, request_: pb.AcquireSandboxesRequest, message: str
) -> None:
    async with daemon(pools=POOLS) as client, grpc.aio.insecure_channel(client.address) as channel:
        request_.pool = "pools/p"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in pb_grpc.SandboxServiceStub(channel).AcquireSandboxes(request_):
                pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (raised.value.details() or "")


async def test_gangs_of_callers_that_leave_at_any_moment_leave_no_lease(daemon: OpenDaemon) -> None:
    pools = {"p": {"backend": "fake", "warm": 8, "start_limit": 50, "size_limit": 16}}
    async with daemon(pools=pools, fake={"start_seconds": 0.002}) as client:
        for n in range(100):
            acquisition = asyncio.ensure_future(gang_of(client, 1 + n % 8))
            await asyncio.wait({acquisition}, timeout=n * 0.0001)
            acquisition.cancel()
            try:
                boxes = await acquisition
            except asyncio.CancelledError:
                continue
            await asyncio.gather(*(box.release() for box in boxes))
        async with asyncio.timeout(20):
            while (await client.get_pool("p")).active:
                await asyncio.sleep(0.02)
        stats = await client.get_pool("p")
        assert stats.acquired_total == stats.released_total > 0
        assert stats.expired_total == 0


async def gang_of(client: Client, count: int) -> list[Box]:
    return await client.acquire_gang("p", count, ttl=3600, timeout=30)
