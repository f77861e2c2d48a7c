"""Backends that are away or hung for a time: bounded waits, one line in the log, no sandbox too many."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sandboxd import errors
from sandboxd.availability import Availability, Looks
from sandboxd.backends.fake import FakeBackend, FakeScript
from sandboxd.clock import ManualClock
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.strays import AGAIN_SECONDS, sweep
from sandboxd.types import PoolState, Template
from tests.sandboxd.conftest import Rig, settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]
LOOKS = Looks(every=10.0, answer=10.0, pause=0.25, pause_limit=5.0, patience=10.0)


@contextlib.asynccontextmanager
async def watched(r: Rig) -> AsyncIterator[Availability]:
    """The pool with somebody who looks at its backend."""
    availability = Availability(r.backend, r.clock, LOOKS)
    r.pool.depend_on(availability)
    looking = asyncio.create_task(availability.run())
    await settle()
    try:
        yield availability
    finally:
        looking.cancel()


async def passing(clock: ManualClock, seconds: float) -> None:
    """Time passes in steps: whoever wakes may sleep again."""
    for _ in range(round(seconds / 0.125)):
        clock.advance(0.125)
        await settle()


async def test_waiters_go_on_when_it_is_back_in_time(rig: OpenRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(size=50, starts=50) as r, watched(r):
        r.backend.script.trouble = "somebody pulled the plug"
        waiting = [asyncio.ensure_future(r.pool.acquire()) for _ in range(20)]
        await passing(r.clock, 1.0)
        stats = r.pool.stats()
        assert (stats.state, stats.state_reason) == (PoolState.UNAVAILABLE, "somebody pulled the plug")
        assert stats.waiting == 20
        # However long it takes: once it is known to be away nothing is tried.
        failures = stats.start_failures_total
        await passing(r.clock, 7.0)
        assert r.pool.stats().start_failures_total == failures < 60
        r.backend.script.trouble = ""
        await passing(r.clock, 20.0)
        assert len({sandbox.id for sandbox in await asyncio.gather(*waiting)}) == 20
        assert r.backend.created_total == 20
        assert r.pool.stats().state is PoolState.OK
    logged = [record.message for record in caplog.records if record.name == "sandboxd.availability"]
    assert logged[0] == "the fake backend is unavailable: somebody pulled the plug"
    assert logged[1].startswith("the fake backend is there again, after ")
    assert len(logged) == 2


async def test_who_has_waited_long_enough_hears_so_and_others_at_once(rig: OpenRig) -> None:
    async with rig(warm=1, size=50) as r, watched(r):
        r.backend.script.trouble = "away"
        ready = r.pool.acquire()
        waiting = asyncio.ensure_future(_after(ready, r))
        await passing(r.clock, 15.0)
        with pytest.raises(errors.BackendUnavailable, match="away") as raised:
            await waiting
        assert raised.value.retry_after == LOOKS.pause_limit
        with pytest.raises(errors.BackendUnavailable, match="away"):
            await r.pool.acquire()
        assert r.pool.stats().waiting == 0
        r.backend.script.trouble = ""
        await passing(r.clock, 6.0)
        await r.pool.acquire()


async def _after(ready: Any, r: Rig) -> None:
    """What is ready is given out, though nothing can be started."""
    await ready
    await r.pool.acquire()


async def test_one_that_gives_no_answer_is_unavailable(rig: OpenRig) -> None:
    async with rig(size=5) as r, watched(r) as availability:
        r.backend.script.hangs = True
        begin = r.clock.now()
        waiting = asyncio.ensure_future(r.pool.acquire())
        while not waiting.done():
            await passing(r.clock, 0.5)
        with pytest.raises(errors.BackendUnavailable, match="gave no answer within 10 s"):
            await waiting
        assert r.clock.now() - begin <= LOOKS.every + LOOKS.answer + 1.0
        r.backend.script.hangs = False
        await passing(r.clock, 20.0)
        assert availability.error is None
        assert r.pool.stats().state is PoolState.OK


async def test_destructions_wait_and_are_said_once(rig: OpenRig, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(size=50) as r, watched(r):
        held = [await r.pool.acquire() for _ in range(10)]
        r.backend.script.trouble = "away"
        for sandbox in held:
            r.pool.release(sandbox.id)
        await passing(r.clock, 100.0)
        assert r.pool.stats().deleting == 10
        said = [record for record in caplog.records if record.name == "sandboxd.insisting"]
        assert 0 < len(said) <= 10
        assert all(record.levelno == logging.WARNING and not record.exc_info for record in said)
        r.backend.script.trouble = ""
        await passing(r.clock, 40.0)
        assert (r.pool.stats().deleting, await r.backend.list_ids()) == (0, [])


async def test_a_pool_ends_though_its_backend_is_away(clock: ManualClock) -> None:
    backend = FakeBackend(FakeScript(), clock=clock)
    options = PoolOptions(Bounds(warm_target=5, size_limit=5, start_limit=5, waiting_limit=5))
    pool = Pool("p", backend=backend, template=Template("p"), options=options, clock=clock)
    availability = Availability(backend, clock, LOOKS)
    pool.depend_on(availability)
    async with pool.run():
        looking = asyncio.create_task(availability.run())
        await settle()
        backend.script.hangs = True
        await passing(clock, 25.0)
        assert availability.error is not None
    # Its sandboxes are for the backend's own `close`.
    looking.cancel()
    backend.script.hangs = False
    assert len(await backend.list_ids()) == 5
    await backend.close()


async def test_a_backend_may_go_away_before_a_pool_runs(clock: ManualClock) -> None:
    """Its sandboxes of an earlier daemon are being taken over, say, which takes a time."""
    backend = FakeBackend(FakeScript(trouble="away"), clock=clock)
    options = PoolOptions(Bounds(warm_target=1, size_limit=5, start_limit=5, waiting_limit=5))
    pool = Pool("p", backend=backend, template=Template("p"), options=options, clock=clock)
    availability = Availability(backend, clock, LOOKS)
    pool.depend_on(availability)
    looking = asyncio.create_task(availability.run())
    await passing(clock, LOOKS.patience)
    assert not looking.done()
    async with pool.run():
        await settle()
        assert pool.stats().starting == 0
        backend.script.trouble = ""
        await passing(clock, LOOKS.pause_limit)
        assert pool.stats().warm == 1
    looking.cancel()


async def test_what_a_second_outage_left_soon_after_the_first_is_swept(clock: ManualClock) -> None:
    backend, template = FakeBackend(clock=clock), Template("p")
    availability = Availability(backend, clock, LOOKS)
    looking = asyncio.create_task(availability.run())
    sweeping = asyncio.create_task(sweep(backend, availability, set, clock))
    await settle()
    # The second begins within the time after which the first one's leavings are looked for again.
    for seconds in (LOOKS.every + LOOKS.pause, 2 * AGAIN_SECONDS):
        backend.script.trouble = "away"
        await passing(clock, seconds)
        assert availability.error is not None
        backend.script.trouble = ""
        await backend.create("p-stray", template)
        await passing(clock, LOOKS.pause_limit)
        assert await backend.list_ids() == []
    await backend.create("p-late", template)
    await passing(clock, AGAIN_SECONDS)
    assert await backend.list_ids() == []
    for task in (looking, sweeping):
        task.cancel()


async def test_what_was_finished_behind_our_back_is_swept(clock: ManualClock) -> None:
    backend, template = FakeBackend(clock=clock), Template("p")
    availability = Availability(backend, clock, LOOKS)
    tasks = [
        asyncio.create_task(availability.run()),
        asyncio.create_task(sweep(backend, availability, lambda: {"p-known"}, clock)),
    ]
    await settle()
    await backend.create("p-known", template)
    backend.script.trouble = "away"
    await passing(clock, LOOKS.every + LOOKS.pause)
    backend.script.trouble = ""
    await backend.create("p-stray", template)
    await passing(clock, LOOKS.pause_limit)
    assert await backend.list_ids() == ["p-known"]
    # What it finishes late is found later.
    await backend.create("p-late", template)
    await passing(clock, AGAIN_SECONDS)
    assert await backend.list_ids() == ["p-known"]
    for task in tasks:
        task.cancel()
    await backend.close()
