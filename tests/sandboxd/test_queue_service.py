"""Gangs, priorities, tenants and positions through a real daemon's door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from sandboxd import Box, Client, QueuePosition, errors
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
# Each is tried until the answer came before it was over.
DEADLINES = (0.3, 2.0, 10.0)
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
        async with asyncio.timeout(20):
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


async def test_tenants_share_by_the_weights_of_the_settings(daemon: OpenDaemon) -> None:
    pools = {"p": {"backend": "fake", "warm": 0, "size_limit": 1}}
    async with daemon(pools=pools, tenants={"b": {"weight": 2}}) as client:
        order: list[str] = []

        async def one(tenant: str) -> None:
            async with client.acquire("p", tenant=tenant, timeout=60):
                order.append(tenant)

        held, calls = await client.acquire("p", timeout=10), []
        async with asyncio.timeout(20):
            for count, tenant in enumerate("aaabbbbbb", 1):
                calls.append(asyncio.ensure_future(one(tenant)))
                while (await client.get_pool("p")).waiting < count:
                    await asyncio.sleep(0.002)
            await held.release()
            await asyncio.gather(*calls)
        assert order == [*"abbabbabb"]


async def test_what_a_callers_own_function_raises_ends_its_call(daemon: OpenDaemon) -> None:
    def refuse(position: QueuePosition) -> None:
        raise KeyError(position.callers_ahead)

    async with daemon(pools=POOLS) as client:
        boxes = await client.acquire_gang("p", 4, timeout=10)
        with pytest.raises(KeyError):
            await client.acquire("p", on_wait=refuse, timeout=60)
        async with asyncio.timeout(20):
            while (await client.get_pool("p")).waiting:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(box.release() for box in boxes))


async def test_a_full_queue_and_a_deadline_say_the_position_on_the_wire(daemon: OpenDaemon) -> None:
    async with daemon(pools=POOLS) as client, client.acquire_gang("p", 4, timeout=10):
        waiting = [asyncio.ensure_future(leased(client, lambda _: None, timeout=60)) for _ in range(3)]
        await waiting_are(client, 3)
        with pytest.raises(errors.QueueFull) as raised:
            await client.acquire("p", timeout=10)
        assert raised.value.metadata["position"] == "3"
        assert raised.value.retry_after == pytest.approx(1.0)
        waiting.pop().cancel()
        await waiting_are(client, 2)
        assert "position" in (await timed_out(client)).metadata
        for each in waiting:
            each.cancel()


async def waiting_are(client: Client, count: int) -> None:
    async with asyncio.timeout(20):
        while (await client.get_pool("p")).waiting != count:
            await asyncio.sleep(0.01)


async def timed_out(client: Client) -> errors.AcquireTimedOut:
    """How the daemon refuses who has waited so long: it says so a moment before its caller's time is over."""
    for seconds in DEADLINES:
        with pytest.raises(errors.AcquireTimedOut) as raised:
            await leased(client, lambda _: None, timeout=seconds)
        if raised.value.metadata:
            break
    return raised.value


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
