"""What is asked of a pool and given up, or cut short by a drain or new settings, at any moment: its books
close, and the backend has what they say and nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sandboxd.errors import Draining
from sandboxd.ledger import Bounds
from sandboxd.pool import PoolOptions
from sandboxd.queueing import Claim
from sandboxd.sandbox import Sandbox
from sandboxd.types import Template

from .conftest import LASTING, Rig

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]
Call = Callable[[Rig, Sandbox], Coroutine[Any, Any, list[Sandbox]]]

TURNS = range(25)


async def one(r: Rig, _: Sandbox) -> list[Sandbox]:
    return [await r.pool.acquire(LASTING)]


async def gang(r: Rig, _: Sandbox) -> list[Sandbox]:
    return await r.pool.acquire_all(LASTING, Claim(count=3))


async def forks(r: Rig, source: Sandbox) -> list[Sandbox]:
    return await r.pool.fork(source.id, 2, LASTING)


async def used(r: Rig, _: Sandbox) -> list[Sandbox]:
    """Also of one that is released at once."""
    sandbox = await r.pool.acquire(LASTING)
    r.pool.release(sandbox.id)
    await r.pool.acquire(LASTING)
    return r.pool.sandboxes()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def books_close(r: Rig) -> None:
    pool = r.pool
    await r.until(lambda: pool.quiet and not r.backend.branches())
    pool.check()
    stats = pool.stats()
    ended = stats.released_total + stats.expired_total + stats.lost_total
    assert stats.acquired_total == ended + stats.active
    assert sorted(await r.backend.list_ids()) == sorted(sandbox.id for sandbox in pool.sandboxes())


@pytest.mark.parametrize("call", [one, gang, forks, used])
@pytest.mark.parametrize("warm", [0, 3])
async def test_a_call_that_is_given_up_at_any_moment(rig: OpenRig, call: Call, warm: int) -> None:
    async with asyncio.timeout(50), rig(warm=warm) as r:
        source = await r.pool.acquire(LASTING)
        for after in TURNS:
            calling = asyncio.create_task(call(r, source))
            await turns(after)
            calling.cancel()
            await asyncio.wait([calling])
            for sandbox in r.pool.sandboxes():
                if sandbox is not source:
                    r.pool.release(sandbox.id)
            await books_close(r)
            assert r.pool.stats().active == 1
            assert r.pool.get(source.id) is source


@pytest.mark.parametrize("call", [one, gang, forks])
async def test_a_pool_that_gets_other_settings_at_any_moment(rig: OpenRig, call: Call) -> None:
    async with asyncio.timeout(50), rig(warm=3) as r:
        source = await r.pool.acquire(LASTING)
        for after in TURNS:
            template = Template("p", env={b"N": b"%d" % after})
            calling = asyncio.create_task(call(r, source))
            await turns(after)
            r.pool.reconfigure(template, PoolOptions(Bounds(after % 4, 20, 20, 20), default_ttl=60.0))
            for sandbox in await calling:
                r.pool.release(sandbox.id)
            await books_close(r)
            stats = r.pool.stats()
            assert (stats.active, stats.warm) == (1, after % 4)


@pytest.mark.parametrize("call", [one, gang, forks])
async def test_a_pool_that_ends_at_any_moment(rig: OpenRig, call: Call) -> None:
    async with asyncio.timeout(50):
        for after in TURNS:
            async with rig(warm=after % 4) as r:
                source = await r.pool.acquire(LASTING)
                calling = asyncio.create_task(call(r, source))
                await turns(after)
                r.pool.drain()
                await asyncio.wait([calling])
                assert isinstance(calling.exception(), Draining | None)
                # Leases go on.
                for sandbox in calling.result() if calling.exception() is None else ():
                    r.pool.release(sandbox.id)
                await books_close(r)
            r.pool.check()
            assert r.backend.branches() == []
