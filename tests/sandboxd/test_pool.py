"""The pool over the fake backend, with time in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sandboxd.backends.fake import FakeScript
from sandboxd.backends.faults import DESTROY_HANGS_SECONDS
from sandboxd.errors import (
    AcquireTimedOut,
    Draining,
    LeaseExpired,
    Phase,
    QueueFull,
    SandboxLost,
    SandboxNotFound,
    StartFailed,
)
from sandboxd.health import PAUSE_FIRST
from sandboxd.insisting import PAUSE_SECONDS as DESTROY_PAUSE
from sandboxd.leases import Lease
from sandboxd.starting import RetryPolicy
from sandboxd.types import Template

from .conftest import settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]


async def test_keeps_the_target_warm_and_replaces_what_is_taken(rig: OpenRig) -> None:
    async with rig(warm=3) as r:
        assert "3 warm, 0 active" in r.counts
        sandbox = await r.pool.acquire()
        await r.until(lambda: "3 warm, 1 active" in r.counts)
        r.pool.release(sandbox.id)
        await r.until(lambda: "3 warm, 0 active, 0 deleting" in r.counts)
        assert sandbox.id not in await r.backend.list_ids()


async def test_a_released_sandbox_is_never_leased_again(rig: OpenRig) -> None:
    async with rig(warm=1) as r:
        seen = set()
        for _ in range(5):
            sandbox = await r.pool.acquire()
            assert sandbox.id not in seen
            seen.add(sandbox.id)
            r.pool.release(sandbox.id)


async def test_waiters_are_served_in_order(rig: OpenRig) -> None:
    async with rig(size=1, script=FakeScript(start_seconds=1.0)) as r:
        order: list[int] = []

        async def one(n: int) -> None:
            sandbox = await r.pool.acquire()
            order.append(n)
            r.pool.release(sandbox.id)

        tasks = [asyncio.create_task(one(n)) for n in range(3)]
        for _ in range(4):
            await r.advance(1.0)
        assert order == [0, 1, 2]
        await asyncio.gather(*tasks)


async def test_waiting_past_the_deadline_says_the_position(rig: OpenRig) -> None:
    async with rig(size=1) as r:
        await r.pool.acquire()
        first = asyncio.create_task(r.pool.acquire())
        await settle()
        second = asyncio.create_task(r.pool.acquire(timeout=5.0))
        await r.advance(5.0)
        with pytest.raises(AcquireTimedOut, match="1 callers ahead"):
            await second
        first.cancel()
        await settle()
        assert "0 waiting" in r.counts


async def test_a_full_queue_refuses_at_once(rig: OpenRig) -> None:
    async with rig(size=1, waiting=1) as r:
        await r.pool.acquire()
        waiter = asyncio.create_task(r.pool.acquire())
        await settle()
        with pytest.raises(QueueFull):
            await r.pool.acquire()
        waiter.cancel()


async def test_an_acquire_cancelled_before_its_lease_is_in_the_journal_leaves_none(rig: OpenRig) -> None:
    async with rig(warm=2) as r:
        acquiring = [asyncio.create_task(r.pool.acquire()) for _ in range(2)]
        await asyncio.sleep(0)
        assert "2 active" in r.counts
        acquiring[0].cancel()
        await asyncio.wait(acquiring)
        await r.until(lambda: "2 warm, 1 active, 0 deleting" in r.counts)
        assert acquiring[0].cancelled()
        r.pool.release(acquiring[1].result().id)


async def test_a_cancelled_acquire_leaves_no_lease(rig: OpenRig) -> None:
    async with rig(script=FakeScript(start_seconds=1.0)) as r:
        waiter = asyncio.create_task(r.pool.acquire())
        await settle()
        r.clock.advance(1.0)
        # Granted in this very pass of the loop, and cancelled before its task runs.
        while not r.pool.stats().active:
            await asyncio.sleep(0)
        waiter.cancel()
        await settle()
        assert waiter.cancelled()
        assert "0 active" in r.counts


async def test_leases_expire_and_renewals_move_the_end(rig: OpenRig) -> None:
    async with rig() as r:
        kept, dropped = await r.pool.acquire(), await r.pool.acquire(Lease(ttl=10.0))
        await r.advance(10.0)
        with pytest.raises(LeaseExpired, match="ran out after 10 s"):
            r.pool.get(dropped.id)
        await r.advance(40.0)
        r.pool.renew(kept.id)
        await r.advance(59.0)
        assert r.pool.get(kept.id) is kept
        await r.advance(1.0)
        with pytest.raises(LeaseExpired):
            r.pool.renew(kept.id)
        assert r.pool.stats().expired_total == 2
        assert await r.backend.list_ids() == []


async def test_a_shorter_lease_taken_later_expires_first(rig: OpenRig) -> None:
    async with rig() as r:
        await r.pool.acquire(Lease(ttl=100.0))
        await settle()
        short = await r.pool.acquire(Lease(ttl=1.0))
        await r.advance(1.0)
        with pytest.raises(LeaseExpired):
            r.pool.get(short.id)


async def test_release_is_idempotent(rig: OpenRig) -> None:
    async with rig() as r:
        sandbox = await r.pool.acquire()
        r.pool.release(sandbox.id)
        r.pool.release(sandbox.id)
        r.pool.release("p-unknown")
        with pytest.raises(SandboxNotFound, match="was released"):
            r.pool.get(sandbox.id)
        assert r.pool.stats().released_total == 1


async def test_one_request_id_is_one_sandbox(rig: OpenRig) -> None:
    async with rig() as r:
        same = Lease(request_id="r1")
        parallel = await asyncio.gather(*(r.pool.acquire(same) for _ in range(5)))
        assert {sandbox.id for sandbox in parallel} == {(await r.pool.acquire(same)).id}
        assert r.pool.stats().acquired_total == 1
        r.pool.release(parallel[0].id)
        assert (await r.pool.acquire(same)).id != parallel[0].id


async def test_a_request_id_outlives_a_caller_that_gave_up(rig: OpenRig) -> None:
    async with rig(script=FakeScript(start_seconds=1.0)) as r:
        same = Lease(request_id="r1")
        first = asyncio.create_task(r.pool.acquire(same))
        await settle()
        second = asyncio.create_task(r.pool.acquire(same))
        await settle()
        first.cancel()
        await r.advance(1.0)
        assert (await second).id
        assert r.pool.stats().acquired_total == 1


async def test_a_failed_start_is_retried_until_it_works(rig: OpenRig) -> None:
    script = FakeScript(first_failures=[StartFailed("one"), StartFailed("two")])
    async with rig(script=script, retry=RetryPolicy(attempts=3, pause=1.0)) as r:
        waiter = asyncio.create_task(r.pool.acquire())
        await r.advance(8.0)
        await r.advance(8.0)
        assert (await waiter).id
        assert r.pool.stats().start_failures_total == 2


async def test_retries_are_bounded_and_the_error_names_each_attempt(rig: OpenRig) -> None:
    async with rig(faults=["fail create 1"], retry=RetryPolicy(attempts=3, pause=1.0)) as r:
        waiter = asyncio.create_task(r.pool.acquire())
        for _ in range(3):
            await r.advance(8.0)
        with pytest.raises(StartFailed, match=r"attempt 1: create .*attempt 3: create ") as raised:
            await waiter
        assert raised.value.metadata["attempts"] == "3"
        assert raised.value.mask


async def test_retries_end_with_the_budget(rig: OpenRig) -> None:
    retry = RetryPolicy(attempts=100, budget=25.0, pause=0.001)
    async with rig(faults=["slow ready 1 10", "fail ready 1"], retry=retry) as r:
        waiter = asyncio.create_task(r.pool.acquire())
        for _ in range(40):
            await r.advance(1.0)
        with pytest.raises(StartFailed) as raised:
            await waiter
        assert raised.value.metadata["attempts"] == "3"


async def test_a_failure_that_says_when_to_come_back_is_not_tried_before(rig: OpenRig) -> None:
    """As a registry's that limits the rate; meanwhile the slot is others'."""
    limited = [StartFailed("the registry limits the rate", phase=Phase.PULL, retry_after=60.0)]
    retry = RetryPolicy(budget=90.0, pause=0.001, pause_limit=0.001)
    async with rig(script=FakeScript(first_failures=list(limited)), retry=retry, starts=1) as r:
        waiters = [asyncio.create_task(r.pool.acquire()) for _ in range(2)]
        await r.advance(59.0)
        assert [waiter.done() for waiter in waiters] == [True, False]
        await r.advance(2.0)
        assert waiters[1].done()
    # Where the budget does not reach so far the caller hears it at once.
    retry = replace(retry, budget=30.0)
    async with rig(script=FakeScript(first_failures=list(limited)), retry=retry) as r:
        waiter = asyncio.create_task(r.pool.acquire())
        await settle()
        with pytest.raises(StartFailed, match="limits the rate") as raised:
            await waiter
        assert (raised.value.retry_after, raised.value.metadata["attempts"]) == (60.0, "1")


async def test_what_cannot_succeed_is_not_retried_and_every_waiter_hears(rig: OpenRig) -> None:
    fatal = [StartFailed("no such image", phase=Phase.PULL, retryable=False) for _ in range(3)]
    async with rig(script=FakeScript(first_failures=list(fatal)), starts=1) as r:
        waiters = [asyncio.create_task(r.pool.acquire()) for _ in range(3)]
        await settle()
        for waiter in waiters:
            with pytest.raises(StartFailed, match="no such image") as raised:
                await waiter
            assert raised.value.metadata["attempts"] == "1"
            assert not raised.value.retryable
        assert len(r.backend.script.first_failures) == 2


async def test_a_sleeping_retry_does_not_hold_the_starting_slot(rig: OpenRig) -> None:
    script = FakeScript(first_failures=[StartFailed("once")])
    async with rig(script=script, starts=1, retry=RetryPolicy(pause=5.0, pause_limit=5.0)) as r:
        waiters = [asyncio.create_task(r.pool.acquire()) for _ in range(2)]
        await settle()
        assert waiters[0].done()
        assert "1 backing off" in r.counts
        await r.advance(5.0)
        assert waiters[1].done()


async def test_a_hung_start_ends_with_the_timeout(rig: OpenRig) -> None:
    template = Template("p", start_timeout=3.0)
    async with rig(faults=["hang ready 1"], retry=RetryPolicy(attempts=1), template=template) as r:
        waiter = asyncio.create_task(r.pool.acquire())
        await r.advance(3.0)
        with pytest.raises(StartFailed, match="not ready within 3 s") as raised:
            await waiter
        assert raised.value.phase is Phase.READY


async def test_a_hung_pull_ends_with_its_own_timeout(rig: OpenRig) -> None:
    template = Template("p", start_timeout=3.0, pull_timeout=40.0)
    async with rig(faults=["hang pull 1"], retry=RetryPolicy(attempts=1), template=template) as r:
        waiter = asyncio.create_task(r.pool.acquire())
        await r.advance(39.0)
        assert not waiter.done()
        await r.advance(1.0)
        with pytest.raises(StartFailed, match="hang pull") as raised:
            await waiter
        assert (raised.value.phase, raised.value.retryable) == (Phase.PULL, True)


async def test_a_broken_template_makes_no_storm(rig: OpenRig) -> None:
    async with rig(warm=50, faults=["fail start 1"], retry=RetryPolicy(attempts=1)) as r:
        after_first = r.pool.stats().start_failures_total
        await r.advance(PAUSE_FIRST)
        assert r.pool.stats().start_failures_total == after_first + 1
        assert "fail start" in r.pool.stats().last_failure
        r.faulty.faults = ()
        await r.advance(60.0)
        assert "50 warm" in r.counts
        assert r.pool.stats().last_failure == ""


async def test_setup_runs_before_a_sandbox_counts_as_ready(rig: OpenRig) -> None:
    template = Template("p", setup=(b"sh", b"-c", b"echo prepared > mark"))
    async with rig(template=template) as r:
        sandbox = await r.pool.acquire(timeout=None)
        pieces = [piece async for piece in r.pool.connection(sandbox.id).files.read(b"mark")]
        assert b"".join(pieces) == b"prepared\n"


async def test_a_failed_setup_fails_the_start_with_its_log(rig: OpenRig) -> None:
    template = Template("p", setup=(b"sh", b"-c", b"echo no compiler >&2; exit 3"))
    async with rig(template=template) as r:
        with pytest.raises(StartFailed, match="setup ended with EXITED 3") as raised:
            await r.pool.acquire()
        assert raised.value.phase is Phase.SETUP
        assert "no compiler" in raised.value.metadata["log"]
        assert await r.backend.list_ids() == []


async def test_a_dead_warm_sandbox_is_replaced_before_anyone_gets_it(rig: OpenRig) -> None:
    async with rig(warm=2) as r:
        dead = (await r.backend.list_ids())[0]
        r.backend.kill(dead)
        await settle()
        assert "2 warm" in r.counts
        assert dead not in await r.backend.list_ids()
        assert r.pool.stats().lost_total == 0


async def test_a_leased_sandbox_that_dies_is_lost_for_ever(rig: OpenRig) -> None:
    async with rig(warm=1) as r:
        sandbox = await r.pool.acquire()
        r.backend.kill(sandbox.id)
        await settle()
        for _ in range(2):
            with pytest.raises(SandboxLost, match=sandbox.id) as raised:
                r.pool.get(sandbox.id)
            assert raised.value.mask
        stats = r.pool.stats()
        assert (stats.lost_total, stats.active) == (1, 0)


async def test_shutdown_refuses_new_work_and_fails_the_waiters(rig: OpenRig) -> None:
    async with rig(size=1) as r:
        await r.pool.acquire()
        waiter = asyncio.create_task(r.pool.acquire())
        await settle()
        r.pool.drain()
        with pytest.raises(Draining):
            await waiter
        with pytest.raises(Draining):
            await r.pool.acquire()


async def test_shutdown_in_the_middle_of_starts_leaves_nothing(rig: OpenRig) -> None:
    async with rig(warm=5, script=FakeScript(start_seconds=10.0)) as r:
        assert "5 starting" in r.counts
    assert await r.backend.list_ids() == []


async def test_the_blocks_own_exception_comes_out_as_itself(rig: OpenRig) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with rig(warm=1) as r:
            await r.pool.acquire()
            raise KeyError("mine")


async def test_a_lower_target_destroys_the_surplus(rig: OpenRig) -> None:
    async with rig(warm=4) as r:
        r.pool.resize(warm_target=1)
        await settle()
        assert "1 warm" in r.counts
        assert len(await r.backend.list_ids()) == 1


async def test_a_teardown_that_fails_is_tried_again(rig: OpenRig) -> None:
    async with rig(script=FakeScript(destroy_failures=1)) as r:
        sandbox = await r.pool.acquire()
        r.pool.release(sandbox.id)
        await settle()
        assert "1 deleting" in r.counts
        await r.advance(DESTROY_PAUSE)
        assert "0 deleting" in r.counts


async def test_a_teardown_that_hangs_holds_up_no_other_and_is_tried_again(rig: OpenRig) -> None:
    async with rig(faults=["hang destroy 1"], size=3) as r:
        hung, other, expiring = [await r.pool.acquire() for _ in range(3)]
        r.pool.release(hung.id)
        await settle()
        r.faulty.faults = ()
        r.pool.release(other.id)
        await settle()
        assert "1 deleting" in r.counts
        assert set(await r.backend.list_ids()) == {hung.id, expiring.id}
        # Nor is the end of a lease missed meanwhile, nor a place that has become free.
        r.pool.renew(expiring.id, 10.0)
        await r.advance(10.0)
        assert await r.backend.list_ids() == [hung.id]
        await asyncio.gather(r.pool.acquire(), r.pool.acquire())
        await r.advance(DESTROY_HANGS_SECONDS)
        await r.advance(DESTROY_PAUSE)
        assert "0 deleting" in r.counts
        assert hung.id not in await r.backend.list_ids()
