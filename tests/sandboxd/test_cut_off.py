"""Holders of leases are cancelled at each of their waits: once their client is closed, nothing is leased."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from sandboxd import Client, requests
from sandboxd.clock import ManualClock
from sandboxd.errors import BackendUnavailable
from sandboxd.giving_back import PAUSE_SECONDS, GivingBack
from sandboxd.patience import Patience
from tests.cut_kit import Moment, sweep
from tests.sandboxd.conftest import settle

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
Use = Callable[[Client], Any]
POOLS = {"p": {"backend": "fake", "warm": 8, "start_limit": 50}}
TERMS: dict[str, Any] = {"ttl": 3600, "timeout": 30}


async def one(client: Client) -> None:
    async with client.acquire("p", **TERMS) as box:
        await box.exec(["true"], output_limit=100)


async def one_that_hears_its_position(client: Client) -> None:
    async with client.acquire("p", on_wait=lambda _: None, **TERMS):
        pass


async def gang(client: Client) -> None:
    async with client.acquire_gang("p", 3, **TERMS):
        pass


async def forks(client: Client) -> None:
    async with client.acquire("p", **TERMS) as box, box.fork(2, ttl=3600):
        pass


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("use", [one, one_that_hears_its_position, gang, forks])
async def test_a_holder_that_is_cut_off_at_any_wait_leaves_no_lease(
    daemon: OpenDaemon, use: Use, moment: Moment
) -> None:
    async with daemon(pools=POOLS) as control:

        async def with_a_client_of_its_own() -> None:
            await use(client)

        async def books_close(wait: int) -> None:
            await stack.aclose()
            stats = await control.get_pool("p")
            assert (stats.active, stats.released_total) == (0, stats.acquired_total), wait
            await stack.enter_async_context(client)

        client = Client(control.address)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(client)
            async with asyncio.timeout(30):
                cuts = await sweep(with_a_client_of_its_own, moment, books_close)
        stats = await control.get_pool("p")
        assert (stats.expired_total, stats.lost_total) == (0, 0)
        assert cuts >= 3


class Unheard:
    """A method of a daemon that does not answer the first `failures` calls."""

    def __init__(self, failures: int) -> None:
        self.calls = 0
        self._failures = failures

    async def __call__(self, request: object, timeout: float) -> None:
        self.calls += 1
        if self.calls <= self._failures:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away"
            )


async def test_a_release_that_nobody_heard_is_told_again_until_the_lease_has_run_out() -> None:
    clock, heard, never = ManualClock(), Unheard(2), Unheard(100)
    for method in (heard, never):
        giving_back = GivingBack(method, Patience(0.0), clock)
        async with giving_back.run():
            told = giving_back.release("sandboxes/p-1", ttl=3 * PAUSE_SECONDS)
            with pytest.raises(BackendUnavailable):
                await told
            for _ in range(10):
                await settle()
                clock.advance(PAUSE_SECONDS)
            calls = method.calls
        assert method.calls == calls
    assert (heard.calls, never.calls) == (3, 4)


async def test_what_is_asked_for_again_is_withdrawn_no_more() -> None:
    clock, method = ManualClock(), Unheard(100)
    giving_back = GivingBack(method, Patience(0.0), clock)
    request = requests.acquire("p", {"request_id": "r", "ttl": 60.0})
    async with giving_back.run():
        told = giving_back.withdraw(request)
        await asyncio.wait([told])
        giving_back.asked_again("r")
        await settle()
        clock.advance(PAUSE_SECONDS)
        await settle()
        assert method.calls == 1
