"""A client whose caller gives up with the grant on its way: it comes back before the lease runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import Client, errors
from sandboxd.types import PoolStats

from .endings_kit import until
from .relay_kit import Relay

pytestmark = pytest.mark.anyio
# Each is tried until the request was taken before it was over.
DEADLINES = (0.3, 2.0, 10.0)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ending", ["cancelled", "deadline"])
async def test_what_is_granted_to_a_client_that_gave_up_comes_back_at_once(
    daemon: Callable[..., Any], tmp_path: Path, count: int, ending: str
) -> None:
    async with (
        daemon(pools={"p": {"backend": "fake", "warm": 2}}) as client,
        Relay(tmp_path / "relay", client.address) as relay,
        Client(relay.address) as other,
    ):
        await until_stats(other, lambda stats: stats.warm == 2)
        relay.hold()
        if ending == "cancelled":
            leasing = asyncio.ensure_future(leased(other, count, 60))
            await until_stats(client, lambda stats: stats.acquired_total == count)
            leasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leasing
        else:
            await granted_too_late(client, lambda seconds: leased(other, count, seconds))
        await until_stats(client, lambda stats: stats.active == 0)
        stats = await client.get_pool("p")
        assert stats.released_total == stats.acquired_total > 0
        relay.go_on()


async def granted_too_late(client: Client, ask: Callable[[float], Awaitable[object]]) -> None:
    """Asks for so many seconds that a grant was made, of which nothing arrives."""
    for seconds in DEADLINES:
        with pytest.raises(errors.AcquireTimedOut):
            await ask(seconds)
        if (await client.get_pool("p")).acquired_total:
            return
    raise AssertionError("nothing was granted")


async def leased(client: Client, count: int, timeout: float) -> None:
    if count > 1:
        await client.acquire_gang("p", count, ttl=3600, timeout=timeout)
    else:
        await client.acquire("p", ttl=3600, timeout=timeout)


async def until_stats(client: Client, holds: Callable[[PoolStats], bool]) -> None:
    async def look() -> bool:
        return holds(await client.get_pool("p"))

    await until(look)


async def test_a_request_that_came_too_late_may_be_made_again(
    daemon: Callable[..., Any], tmp_path: Path
) -> None:
    async with (
        daemon(pools={"p": {"backend": "fake", "warm": 1}}) as client,
        Relay(tmp_path / "relay", client.address) as relay,
        Client(relay.address) as other,
    ):
        await until_stats(other, lambda stats: stats.warm == 1)
        relay.hold()
        await granted_too_late(client, lambda seconds: other.acquire("p", request_id="mine", timeout=seconds))
        relay.go_on()
        box = await other.acquire("p", request_id="mine", timeout=30)
        # What the first was given and gave back is not what the second has.
        await until_stats(client, lambda stats: stats.released_total == stats.acquired_total - 1 > 0)
        assert (await box.exec(["true"])).ok
        await box.release()


async def test_a_release_that_is_broken_off_is_made_all_the_same(daemon: Callable[..., Any]) -> None:
    """Wherever its caller is cancelled, after so many turns of the event loop."""
    async with daemon(pools={"p": {"backend": "fake", "warm": 2}}) as client:
        async with Client(client.address) as other:
            for turns in range(8):
                leaving = asyncio.Event()
                using = asyncio.ensure_future(leave(other, leaving))
                async with asyncio.timeout(20):
                    await leaving.wait()
                for _ in range(turns):
                    await asyncio.sleep(0)
                using.cancel()
                await asyncio.wait([using])
        stats = await client.get_pool("p")
        assert (stats.active, stats.released_total, stats.acquired_total) == (0, 8, 8)


async def leave(client: Client, leaving: asyncio.Event) -> None:
    async with client.acquire("p", ttl=3600, timeout=60):
        leaving.set()
