"""Sandboxes that failed are kept to be looked at: so many, so long, and while nobody needs their place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd.care import FAILURES_KEPT, Care, Failure, Failures
from sandboxd.errors import Phase, SandboxNotFound, StartFailed
from sandboxd.ledger import Bounds
from sandboxd.pool import PoolOptions
from sandboxd.starting import RetryPolicy
from sandboxd.types import Command, Exited, Template

from .conftest import settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]
FAILS = Template("p", setup=(b"sh", b"-c", b"echo because >&2; exit 3"))


def states(r: Any) -> dict[str, str]:
    return {sandbox.id: sandbox.state.name for sandbox in r.pool.sandboxes()}


async def freeze(r: Any, name: str) -> None:
    """Lets it fail its next check."""
    r.backend.freeze(name)
    for _ in range(40):
        await r.advance(1.0)


async def test_one_that_failed_a_check_is_kept_until_its_time_is_over(rig: OpenRig) -> None:
    async with rig(warm=1, quarantine=2, care=Care(quarantine_seconds=100.0)) as r:
        (bad,) = states(r)
        await freeze(r, bad)
        assert states(r)[bad] == "QUARANTINED"
        assert r.pool.stats().quarantined == 1
        assert sorted(states(r).values()) == ["QUARANTINED", "WARM"]
        await r.advance(70.0)
        assert bad in states(r)
        await r.advance(30.0)
        assert bad not in states(r)
        assert bad not in await r.backend.list_ids()


async def test_the_limit_pushes_the_oldest_out(rig: OpenRig) -> None:
    async with rig(warm=1, quarantine=2) as r:
        failed = []
        for _ in range(3):
            (bad,) = (name for name, state in states(r).items() if state == "WARM")
            await freeze(r, bad)
            failed.append(bad)
        assert [name for name, state in states(r).items() if state == "QUARANTINED"] == failed[1:]


async def test_a_caller_that_waits_is_worth_more(rig: OpenRig) -> None:
    async with rig(warm=0, size=2, quarantine=2) as r:
        first, second = await r.pool.acquire(), await r.pool.acquire()
        del first
        r.pool.resize(warm_target=1)
        r.pool.release(second.id)
        await settle()
        (bad,) = (name for name, state in states(r).items() if state == "WARM")
        await freeze(r, bad)
        # In quarantine it takes the place that the pool would fill for nobody.
        assert sorted(states(r).values()) == ["ACTIVE", "QUARANTINED"]
        sandbox = await r.pool.acquire(timeout=1.0)
        assert sandbox.id != bad
        assert bad not in states(r)


async def test_a_failed_setup_leaves_the_sandbox_as_it_was(rig: OpenRig) -> None:
    template = Template("p", setup=(b"sh", b"-c", b"echo because >&2; touch trace; exit 3"))
    async with rig(template=template, quarantine=1) as r:
        with pytest.raises(StartFailed, match="setup ended with EXITED 3"):
            await r.pool.acquire()
        ((bad, state),) = states(r).items()
        assert state == "QUARANTINED"
        inspection = await r.pool.inspect(bad)
        assert inspection.failure.phase is Phase.SETUP
        assert inspection.failure.log == "because\n"
        trace = Path(inspection.place["directory"]) / "workspace" / "trace"
        assert trace.exists()


async def test_without_a_quarantine_a_failed_setup_leaves_only_the_word_of_it(rig: OpenRig) -> None:
    async with rig(template=FAILS) as r:
        with pytest.raises(StartFailed):
            await r.pool.acquire()
        assert states(r) == {}
        (failure,) = r.pool.failures()
        inspection = await r.pool.inspect(failure.sandbox)
        assert (inspection.sandbox, inspection.failure, inspection.place) == (None, failure, {})


async def test_each_attempt_to_start_is_remembered(rig: OpenRig) -> None:
    async with rig(faults=["fail start 1"], retry=RetryPolicy(attempts=3, pause=0.0)) as r:
        acquiring = asyncio.create_task(r.pool.acquire())
        for _ in range(3):
            await r.advance(1.0)
        with pytest.raises(StartFailed):
            await acquiring
        failures = r.pool.failures()
        assert [failure.attempt for failure in failures] == [1, 2, 3]
        assert {failure.sandbox for failure in failures} == {failures[0].sandbox}
        assert {failure.phase for failure in failures} == {Phase.START}


async def test_a_setup_that_is_tried_again_begins_in_a_new_sandbox(rig: OpenRig) -> None:
    setup = (b"sh", b"-c", b"test -e trace && exit 9; touch trace; sleep 9")
    template = Template("p", setup=setup, start_timeout=0.5)
    retry = RetryPolicy(attempts=2, pause=0.0)
    async with rig(template=template, retry=retry, quarantine=1) as r:
        acquiring = asyncio.create_task(r.pool.acquire())
        # The pause is over at once, but nobody knows when it begins.
        await r.until(lambda: r.clock.advance(0.0) or len(r.pool.failures()) == 2)
        with pytest.raises(StartFailed, match=r"attempt 2: setup after .*: setup ended with TIMED_OUT"):
            await acquiring
        assert list(states(r).values()) == ["QUARANTINED"]


async def test_other_settings_hold_for_what_is_kept(rig: OpenRig) -> None:
    async with rig(template=FAILS, quarantine=2) as r:
        for _ in range(2):
            with pytest.raises(StartFailed):
                await r.pool.acquire()
        assert list(states(r).values()) == ["QUARANTINED"] * 2
        newest = list(states(r))[-1]
        bounds = Bounds(0, 10, 4, 10, quarantine_limit=1)
        r.pool.reconfigure(Template("p"), PoolOptions(bounds, care=Care(quarantine_seconds=5.0)))
        await r.until(lambda: list(states(r)) == [newest])
        assert r.pool.stats().quarantined == 1


async def test_who_is_in_quarantine_is_nobodys(rig: OpenRig) -> None:
    async with rig(template=FAILS, quarantine=1) as r:
        with pytest.raises(StartFailed):
            await r.pool.acquire()
        (bad,) = states(r)
        with pytest.raises(SandboxNotFound):
            r.pool.get(bad)
        r.pool.release(bad)
        assert bad in states(r)


async def test_a_name_that_means_nothing_is_not_inspected(rig: OpenRig) -> None:
    async with rig(warm=0) as r:
        with pytest.raises(SandboxNotFound, match="no sandbox 'p-1' in pool 'p'"):
            await r.pool.inspect("p-1")
        sandbox = await r.pool.acquire()
        async with sandbox.connection.exec(Command((b"true",))) as events:
            assert isinstance([event async for event in events][-1], Exited)
        inspection = await r.pool.inspect(sandbox.id)
        assert inspection.sandbox is sandbox
        assert Path(inspection.place["directory"]).is_dir()
        r.pool.release(sandbox.id)
        await r.until(lambda: not r.pool.sandboxes())
        with pytest.raises(SandboxNotFound, match="was released"):
            await r.pool.inspect(sandbox.id)


async def test_the_oldest_failures_are_forgotten() -> None:
    failures = Failures()
    error = StartFailed("why", phase=Phase.READY)
    for n in range(FAILURES_KEPT + 5):
        failures.add(Failure.of(f"s{n}", error, float(n)))
    assert len(failures.all()) == FAILURES_KEPT
    assert failures.last_of("s4") is None
    assert failures.last_of("s5") is not None
