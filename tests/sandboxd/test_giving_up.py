"""A client whose caller gives up with the grant on its way: it comes back before the lease runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import Client, errors
from sandboxd.types import PoolStats

from .endings_kit import Relay, until

pytestmark = pytest.mark.anyio


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
        timeout = 0.5 if ending == "deadline" else 60
        leasing = asyncio.ensure_future(leased(other, count, timeout))
        await until_stats(client, lambda stats: stats.acquired_total == count)
        if ending == "cancelled":
            leasing.cancel()
        with pytest.raises(asyncio.CancelledError if ending == "cancelled" else errors.AcquireTimedOut):
            await leasing
        await until_stats(client, lambda stats: stats.active == 0)
        assert (await client.get_pool("p")).released_total == count
        relay.go_on()


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
        with pytest.raises(errors.AcquireTimedOut):
            await other.acquire("p", request_id="mine", timeout=0.3)
        relay.go_on()
        box = await other.acquire("p", request_id="mine", timeout=30)
        # What the first was given and gave back is not what the second has.
        await until_stats(client, lambda stats: stats.released_total == 1)
        assert (await box.exec(["true"])).ok
        await box.release()
