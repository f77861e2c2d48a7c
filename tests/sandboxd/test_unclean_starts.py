"""Starts that fail or are cancelled, and cannot be cleaned up after: what they left is destroyed later on."""

from __future__ import annotations

import asyncio

import pytest

from sandboxd.backends.fake import FakeBackend, FakeConnection
from sandboxd.clock import ManualClock
from sandboxd.errors import BackendUnavailable, Phase, StartFailed
from sandboxd.insisting import PAUSE_SECONDS
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.sandbox import Sandbox
from sandboxd.types import Template

from .conftest import settle

pytestmark = pytest.mark.anyio


def pool_on(
    backend: FakeBackend, clock: ManualClock, *, warm: int = 0, setup: tuple[bytes, ...] = ()
) -> Pool:
    options = PoolOptions(Bounds(warm_target=warm, size_limit=9, start_limit=9, waiting_limit=9))
    return Pool("p", backend=backend, template=Template("p", setup=setup), options=options, clock=clock)


class DyingOnce(FakeBackend):
    """The first sandbox dies before it is set up."""

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        connection = await super().create(sandbox_id, template)
        if self.created_total == 1:
            connection.die("killed by the host")
        return connection


async def test_a_clean_up_that_fails_is_not_the_templates_fault(clock: ManualClock) -> None:
    backend = DyingOnce(clock=clock)
    pool = pool_on(backend, clock, setup=(b"true",))
    async with pool.run():
        backend.script.destroy_failures = 2
        ends = await asyncio.gather(pool.acquire(), pool.acquire(), return_exceptions=True)
        (error,) = [end for end in ends if not isinstance(end, Sandbox)]
        assert isinstance(error, StartFailed)
        assert error.retryable
        assert "setup: the sandbox died: killed by the host" in error.message
        # What it left counts until it is gone.
        assert pool.stats().deleting == 1
        assert len(await backend.list_ids()) == 2
        clock.advance(PAUSE_SECONDS)
        await settle()
        assert pool.stats().deleting == 0
        assert await backend.list_ids() == [end.id for end in ends if isinstance(end, Sandbox)]
        pool.check()


class Unclean(FakeBackend):
    """Hangs in a start, and when it is cancelled leaves its sandbox and says that it is not available.

    Of forks, the second fails at once.
    """

    def __init__(self, clock: ManualClock, *, forks: bool) -> None:
        super().__init__(clock=clock)
        self.asked: list[str] = []
        self._forks = forks

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        if self._forks and not template.branches:
            return await super().create(sandbox_id, template)
        self.asked.append(sandbox_id)
        if len(self.asked) == 2:
            raise StartFailed("no such thing", phase=Phase.CREATE, retryable=False)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await super().create(sandbox_id, template)
            raise BackendUnavailable("it does not answer") from None
        raise AssertionError("nobody sets that future")


async def test_a_cancelled_start_leaves_nothing_at_the_end(clock: ManualClock) -> None:
    backend = Unclean(clock, forks=False)
    pool = pool_on(backend, clock, warm=1)
    async with pool.run():
        await settle()
        assert len(backend.asked) == 1
    assert len(backend.asked) == 1
    assert await backend.list_ids() == []


async def test_a_cancelled_start_of_a_fork_is_not_tried_again(clock: ManualClock) -> None:
    backend = Unclean(clock, forks=True)
    pool = pool_on(backend, clock)
    async with pool.run():
        source = await pool.acquire()
        with pytest.raises(StartFailed, match="no such thing"):
            await asyncio.wait_for(pool.fork(source.id, 2, Lease()), 20)
        assert len(backend.asked) == 2
        async with asyncio.timeout(20):
            while len(await backend.list_ids()) > 1:
                await asyncio.sleep(0)
        assert await backend.list_ids() == [source.id]
