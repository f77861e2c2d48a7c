"""Sandboxes that wait for a caller are asked whether they are there, at low cost and before a lease."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.care import Care
from sandboxd.checkups import ANSWER_SECONDS, PAUSE_LIMIT_SECONDS, QUESTIONS
from sandboxd.errors import AcquireTimedOut, Cause, Phase
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.types import Template

from .conftest import settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]
# Nothing is asked in the background within a test that does not wait for so long.
RARELY = Care(check_seconds=1e6)


def warm(r: Any) -> list[str]:
    return [sandbox.id for sandbox in r.pool.sandboxes() if sandbox.state.name == "WARM"]


async def no_answer(r: Any) -> None:
    """So much time passes that whoever was asked and has not answered will not."""
    for _ in range(QUESTIONS):
        await r.advance(ANSWER_SECONDS)


async def test_one_that_stopped_answering_is_found_in_the_background_and_replaced(rig: OpenRig) -> None:
    async with rig(warm=3) as r:
        frozen = warm(r)[1]
        r.backend.freeze(frozen)
        for _ in range(20):
            await r.advance(1.0)
        assert frozen in warm(r)
        for _ in range(20):
            await r.advance(1.0)
        assert frozen not in warm(r)
        assert len(warm(r)) == 3
        assert r.pool.stats().unhealthy_total == 1
        (failure,) = r.pool.failures()
        assert (failure.sandbox, failure.phase, failure.cause) == (frozen, Phase.READY, Cause.INFRASTRUCTURE)
        assert "gave no answer within 5 s" in failure.message


async def test_one_that_lied_about_being_ready_is_found(rig: OpenRig) -> None:
    async with rig(warm=2, faults=["lie 1"]) as r:
        liars = set(warm(r))
        r.faulty.faults = ()
        await r.advance(15.0)
        await r.advance(PAUSE_LIMIT_SECONDS)
        assert liars.isdisjoint(warm(r))
        assert len(warm(r)) == 2
        assert r.pool.stats().unhealthy_total == 2
        assert "it said that it was ready and runs nothing" in r.pool.failures()[0].message


async def test_a_fresh_one_is_leased_without_a_question(rig: OpenRig) -> None:
    async with rig(warm=1) as r:
        r.backend.freeze(warm(r)[0])
        await r.pool.acquire(timeout=1.0)


async def test_one_that_is_not_fresh_is_asked_before_it_is_leased(rig: OpenRig) -> None:
    async with rig(warm=2, size=2, care=Care(check_seconds=30.0)) as r:
        good, bad = warm(r)
        r.backend.freeze(good)
        r.backend.freeze(bad)
        # The one question on its way in the background has no answer yet.
        await r.advance(31.0)
        acquiring = asyncio.create_task(r.pool.acquire())
        await settle()
        assert not acquiring.done()
        assert "2 warm, 0 active" in r.counts
        r.backend.thaw(good)
        sandbox = await acquiring
        assert sandbox.id == good
        await no_answer(r)
        assert bad not in warm(r)
        assert r.pool.stats().unhealthy_total == 1


async def test_all_that_are_leased_answer_when_a_third_has_silently_stopped(rig: OpenRig) -> None:
    async with rig(warm=30, size=60) as r:
        stopped = warm(r)[::3]
        await r.advance(0.0)
        for name in stopped:
            r.backend.freeze(name)
        r.clock.advance(60.0)
        acquiring = [asyncio.create_task(r.pool.acquire()) for _ in range(30)]
        await settle()
        await no_answer(r)
        given = [(await task).id for task in acquiring]
        assert len(given) == 30
        assert set(given).isdisjoint(stopped)
        assert r.pool.stats().unhealthy_total == 10


async def test_a_warm_one_that_dies_is_replaced_counted_and_explained(rig: OpenRig) -> None:
    async with rig(warm=2, care=RARELY) as r:
        dead = warm(r)[0]
        r.backend.kill(dead)
        await settle()
        assert len(warm(r)) == 2
        assert r.pool.stats().unhealthy_total == 1
        assert r.pool.stats().lost_total == 0
        inspection = await r.pool.inspect(dead)
        assert inspection.sandbox is None
        assert inspection.failure is not None
        assert "killed by the test" in inspection.failure.message


async def test_a_question_costs_a_tenth_of_the_time_at_most(rig: OpenRig) -> None:
    async with rig(warm=4, care=Care(check_seconds=2.0)) as r:
        first = warm(r)[0]
        r.backend.freeze(first)
        await r.advance(1.0)
        await r.advance(0.1)
        r.backend.thaw(first)
        await settle()
        # An answer that took 0.1 s is followed by a pause of 0.9 s; then the others, that answer at once.
        later = [sandbox for sandbox in r.pool.sandboxes() if sandbox.id != first]
        assert {sandbox.answered for sandbox in later} == {0.0}
        await r.advance(0.85)
        assert {sandbox.answered for sandbox in later} == {0.0}
        await r.advance(0.06)
        for _ in later:
            await r.advance(0.0)
        assert {round(sandbox.answered, 2) for sandbox in later} == {2.01}


async def test_an_answer_to_the_second_question_is_one(rig: OpenRig) -> None:
    async with rig(warm=1, size=1) as r:
        (name,) = warm(r)
        r.backend.freeze(name)
        await r.advance(31.0)
        acquiring = asyncio.create_task(r.pool.acquire())
        await r.advance(ANSWER_SECONDS)
        r.backend.thaw(name)
        assert (await acquiring).id == name


async def test_a_guest_that_was_stopped_for_real_is_replaced(backend: NamespaceBackend) -> None:
    options = PoolOptions(Bounds(1, 2, 4, 10), care=Care(check_seconds=0.1))
    pool = Pool("p", backend=backend, template=Template("p"), options=options)
    async with asyncio.timeout(50), pool.run():
        while not (ready := [each.id for each in pool.sandboxes() if each.state.name == "WARM"]):
            await asyncio.sleep(0.01)
        os.kill(await backend.pid_of(ready[0]), signal.SIGSTOP)
        while pool.stats().unhealthy_total == 0:
            await asyncio.sleep(0.01)
        sandbox = await pool.acquire()
        assert sandbox.id != ready[0]
        assert sandbox.connection is not None
        await sandbox.connection.ping()


async def test_checks_can_be_turned_off(rig: OpenRig) -> None:
    async with rig(warm=1, care=Care(check_seconds=0.0)) as r:
        frozen = warm(r)[0]
        r.backend.freeze(frozen)
        await r.advance(1000.0)
        assert warm(r) == [frozen]
        # And on again: what has not answered for so long is asked first.
        r.pool.reconfigure(Template("p"), PoolOptions(Bounds(1, 1, 4, 10), care=Care(check_seconds=30.0)))
        acquiring = asyncio.create_task(r.pool.acquire())
        await no_answer(r)
        assert (await acquiring).id != frozen


async def test_without_checks_nothing_is_asked_before_a_lease(rig: OpenRig) -> None:
    async with rig(warm=1, care=Care(check_seconds=0.0)) as r:
        frozen = warm(r)[0]
        r.backend.freeze(frozen)
        await r.advance(1000.0)
        assert (await r.pool.acquire()).id == frozen


async def test_a_caller_whose_time_is_over_leaves_while_a_sandbox_is_asked(rig: OpenRig) -> None:
    async with rig(warm=1, size=1) as r:
        r.backend.freeze(warm(r)[0])
        await r.advance(31.0)
        acquiring = asyncio.create_task(r.pool.acquire(timeout=1.0))
        await r.advance(1.0)
        with pytest.raises(AcquireTimedOut):
            await acquiring


async def test_an_end_in_the_middle_of_a_question_leaves_nothing(rig: OpenRig) -> None:
    async with rig(warm=2, size=2) as r:
        for name in warm(r):
            r.backend.freeze(name)
        await r.advance(31.0)
        acquiring = asyncio.create_task(r.pool.acquire())
        await settle()
    assert acquiring.done()
    assert acquiring.exception() is not None
