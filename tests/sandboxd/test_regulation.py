"""Pools whose starts are regulated: by demand, by the host, by a rate, by their own failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from sandboxd.availability import Availability
from sandboxd.backends.fake import FakeBackend, FakeConnection, FakeScript
from sandboxd.backends.faults import Fault, FaultyBackend
from sandboxd.client import Client
from sandboxd.clock import ManualClock
from sandboxd.config import ConfigError, load
from sandboxd.daemon import running
from sandboxd.errors import BackendUnavailable, SandboxdError, StartFailed
from sandboxd.health import PAUSE_FIRST
from sandboxd.ledger import Bounds
from sandboxd.pacing import Pace
from sandboxd.pool import Pool, PoolOptions
from sandboxd.regulator import Regulation
from sandboxd.sandbox import Sandbox
from sandboxd.sizing import HALVING_SECONDS
from sandboxd.slots import Slots
from sandboxd.starting import RetryPolicy
from sandboxd.types import PoolState, Template

from .conftest import LASTING, settle

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def pools(
    clock: ManualClock,
    *regulations: Regulation,
    warm: int = 0,
    script: FakeScript | None = None,
    faults: Sequence[str] = (),
    backend: FakeBackend | None = None,
    start_timeout: float = 30.0,
) -> AsyncIterator[tuple[FakeBackend, list[Pool]]]:
    """A pool for each regulation, all on one fake backend whose starts take a second."""
    backend = backend or FakeBackend(script or FakeScript(start_seconds=1.0), clock=clock)
    made = []
    async with contextlib.AsyncExitStack() as stack:
        for number, regulation in enumerate(regulations):
            options = PoolOptions(
                Bounds(warm, 100, 100, 100), 1e6, RetryPolicy(attempts=1), regulation=regulation
            )
            name = f"p{number}"
            fault = [Fault.parse(faults[number])] if faults and faults[number] else []
            faulty = FaultyBackend(backend, fault, clock=clock)
            template = Template(name, start_timeout=start_timeout)
            pool = Pool(name, backend=faulty, template=template, options=options, clock=clock)
            made.append(await stack.enter_async_context(pool.run()))
        await settle()
        yield backend, made


async def advance(clock: ManualClock, seconds: float) -> None:
    await settle()
    clock.advance(seconds)
    await settle()


def starting(*made: Pool) -> list[int]:
    return [pool.stats().starting for pool in made]


def callers(pool: Pool, count: int) -> list[asyncio.Task[Sandbox]]:
    return [asyncio.create_task(pool.acquire()) for _ in range(count)]


async def prepare(clock: ManualClock, *made: Pool) -> None:
    """A pool's very first start takes no slot until its image is there."""
    for pool in made:
        (first,) = callers(pool, 1)
        await advance(clock, 1.0)
        pool.release((await first).id)


async def test_two_pools_share_what_their_host_can_start_at_once(clock: ManualClock) -> None:
    shared = Regulation(slots=Slots(Pace(floor=4, ceiling=4)))
    async with pools(clock, shared, shared) as (backend, (first, second)):
        await prepare(clock, first, second)
        many, few = callers(first, 20), callers(second, 3)
        await settle()
        assert starting(first, second) == [4, 0]
        await advance(clock, 1.0)
        assert starting(first, second) == [2, 2]
        await advance(clock, 1.0)
        assert starting(first, second) == [3, 1]
        for _ in range(5):
            await advance(clock, 1.0)
        assert backend.created_total == 2 + 23
        await asyncio.gather(*many, *few)


async def test_who_waits_for_an_image_keeps_no_other_pool_waiting(clock: ManualClock) -> None:
    shared = Regulation(slots=Slots(Pace(floor=1, ceiling=1)))
    async with pools(clock, shared, shared, faults=("hang pull 1.0", "")) as (backend, (first, second)):
        pulling, waiting = callers(first, 20), callers(second, 2)
        await settle()
        assert starting(first, second) == [1, 1]
        await advance(clock, 1.0)
        assert starting(first, second) == [1, 1]
        await advance(clock, 1.0)
        assert backend.created_total == 2
        await asyncio.gather(*waiting)
        for caller in pulling:
            caller.cancel()


class Pulling(FakeBackend):
    """Nobody sends it the image `slow`."""

    async def prepare(self, template: Template) -> None:
        if template.image == "slow":
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("image", "others"), [("slow", 4), (None, 0)])
async def test_another_template_leaves_the_slots_of_what_it_replaces(
    clock: ManualClock, image: str | None, others: int
) -> None:
    """Settings that replace nothing leave none: those starts go on."""
    shared = Regulation(slots=Slots(Pace(floor=8, ceiling=8)))
    backend = Pulling(FakeScript(start_seconds=1.0), clock=clock)
    async with pools(clock, shared, shared, backend=backend) as (_, (first, second)):
        await prepare(clock, first, second)
        backend.script.start_seconds = 1e6
        first.resize(warm_target=8)
        await settle()
        assert starting(first, second) == [8, 0]
        options = PoolOptions(Bounds(8, 100, 100, 100), regulation=shared)
        first.reconfigure(Template("p0", image=image), options)
        second.resize(warm_target=4)
        await settle()
        assert starting(second) == [others]


async def test_one_slot_for_two_pools_goes_to_and_fro(clock: ManualClock) -> None:
    shared = Regulation(slots=Slots(Pace(floor=1, ceiling=1)))
    async with pools(clock, shared, shared) as (_, (first, second)):
        await prepare(clock, first, second)
        waiting = [*callers(first, 4), *callers(second, 4)]
        seen = []
        for _ in range(8):
            await settle()
            seen.append(starting(first, second))
            await advance(clock, 1.0)
        assert seen == [[1, 0], [0, 1]] * 4
        await asyncio.gather(*waiting)


async def test_a_pool_that_ends_leaves_its_slots_to_others(clock: ManualClock) -> None:
    shared = Regulation(slots=Slots(Pace(floor=1, ceiling=1)))
    async with pools(clock, shared) as (_, (first,)):
        async with pools(clock, shared) as (_, (second,)):
            await prepare(clock, first, second)
            gone, waiting = callers(second, 1), callers(first, 1)
            await settle()
            assert starting(first, second) == [0, 1]
            gone[0].cancel()
        await advance(clock, 1.0)
        assert waiting[0].done()


async def test_pools_whose_backend_is_away_do_not_wake_one_another(clock: ManualClock) -> None:
    shared = Regulation(slots=Slots(Pace(floor=8, ceiling=8)))
    async with pools(clock, shared, shared, warm=1) as (backend, (first, second)):
        await advance(clock, 1.0)
        backend.script.trouble = "away"
        availability = Availability(backend, clock)
        for pool in (first, second):
            pool.depend_on(availability)
        looking = asyncio.create_task(availability.run())
        await settle()
        plans: list[str] = []
        for pool in (first, second):
            pool.changes.forward(partial(plans.append, pool.name))
            pool.resize(warm_target=5)
        await settle()
        assert plans == ["p0", "p1"]
        backend.script.trouble = ""
        await advance(clock, 1.0)
        assert starting(first, second) == [4, 4]
        looking.cancel()


async def test_the_limit_rises_while_that_brings_more(clock: ManualClock) -> None:
    slots = Slots(Pace(ceiling=32, first=2))
    async with pools(clock, Regulation(slots=slots)) as (_, (pool,)):
        waiting = callers(pool, 100)
        await settle()
        assert starting(pool) == [2]
        for _ in range(12):
            await advance(clock, 1.0)
        assert pool.stats().start_limit == slots.pace.limit > 16
        await asyncio.gather(*waiting)


class Failing(FakeBackend):
    """Starts fail with `error`, once there is one, after the time that they take."""

    error: SandboxdError | None = None

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        connection = await super().create(sandbox_id, template)
        if self.error is None:
            return connection
        await self.destroy(sandbox_id)
        raise self.error


@pytest.mark.parametrize(
    ("error", "limit"), [(BackendUnavailable("the Engine broke off"), 8), (StartFailed("no memory"), 4)]
)
async def test_an_outage_does_not_lower_the_limit(
    clock: ManualClock, error: SandboxdError, limit: int
) -> None:
    """Starts that fail by themselves do."""
    slots = Slots(Pace(ceiling=8, first=8))
    backend = Failing(FakeScript(start_seconds=1.0), clock=clock)
    async with pools(clock, Regulation(slots=slots), backend=backend) as (_, (pool,)):
        await prepare(clock, pool)
        backend.error = error
        waiting = callers(pool, 8)
        await advance(clock, 1.0)
        assert slots.pace.limit == limit
        backend.error = None
        for caller in waiting:
            caller.cancel()
        await asyncio.wait(waiting)


async def test_starts_follow_the_rate_that_was_set(clock: ManualClock) -> None:
    async with pools(clock, Regulation(starts_per_second=2.0)) as (backend, (pool,)):
        waiting = callers(pool, 7)
        await settle()
        assert starting(pool) == [2]
        counts = []
        for _ in range(6):
            await advance(clock, 0.5)
            counts.append(backend.created_total + pool.stats().starting)
        assert counts == [3, 4, 5, 6, 7, 7]
        await advance(clock, 1.0)
        await asyncio.gather(*waiting)


async def test_forks_wait_for_slots_and_rate(clock: ManualClock) -> None:
    regulation = Regulation(slots=Slots(Pace(floor=2, ceiling=2)), starts_per_second=1.0)
    # The clock runs far ahead while a thread copies files.
    async with pools(clock, regulation, start_timeout=1e9) as (backend, (pool,)):
        source = asyncio.create_task(pool.acquire(LASTING))
        await advance(clock, 1.0)
        forking = asyncio.create_task(pool.fork((await source).id, 3, LASTING))
        async with asyncio.timeout(30):
            while backend.created_total < 4:
                clock.advance(0.25)
                await asyncio.sleep(0)
        # The first token has come back, the others follow by a second; the last one's start takes another.
        assert clock.now() >= 4.0
        assert len(await forking) == 3


async def test_demand_raises_the_target_and_a_pause_lowers_it_slowly(clock: ManualClock) -> None:
    async with pools(clock, Regulation(warm_limit=20), warm=2) as (_, (pool,)):
        await advance(clock, 1.0)
        taken = callers(pool, 10)
        await settle()
        assert pool.stats().warm_target == 10
        for _ in range(3):
            await advance(clock, 1.0)
        await asyncio.gather(*taken)
        assert pool.stats().warm == 10
        await advance(clock, HALVING_SECONDS)
        assert 4 <= pool.stats().warm <= 6
        for _ in range(20):
            await advance(clock, HALVING_SECONDS)
        assert pool.stats().warm == pool.stats().warm_target == 2


async def test_what_is_announced_is_ready_in_time_and_not_much_earlier(clock: ManualClock) -> None:
    async with pools(clock, Regulation(slots=Slots(Pace(floor=5, ceiling=5)))) as (_, (pool,)):
        # Once a start was measured: without that it would begin at once.
        await prepare(clock, pool)
        pool.announce("a", 20, 60.0, 120.0)
        await advance(clock, 30.0)
        assert starting(pool) == [0]
        for _ in range(30):
            await advance(clock, 1.0)
        assert pool.stats().warm == 20
        await asyncio.gather(*callers(pool, 15))
        await advance(clock, 5.0)
        assert pool.stats().warm == 5
        await advance(clock, 120.0)
        assert pool.stats().warm == 0


async def test_what_was_announced_can_be_withdrawn(clock: ManualClock) -> None:
    async with pools(clock, Regulation()) as (_, (pool,)):
        pool.announce("a", 3, 0.0, 60.0)
        await advance(clock, 1.0)
        assert pool.stats().warm == 3
        pool.announce("a", 0, 0.0, 0.0)
        assert pool.stats().warm == 0


async def test_a_broken_template_is_told_once_when_it_begins_and_once_when_it_ends(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    script = FakeScript(first_failures=[StartFailed("no such image") for _ in range(10)])
    with caplog.at_level(logging.INFO, logger="sandboxd"):
        async with pools(clock, Regulation(), warm=8, script=script) as (_, (pool,)):
            assert pool.stats().state is PoolState.DEGRADED
            assert "no such image" in pool.stats().last_failure
            for pause in range(4):
                await advance(clock, PAUSE_FIRST * 2**pause)
            assert (pool.stats().state, pool.stats().warm) == (PoolState.OK, 8)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert len(told) == 2
    assert told[0].startswith("pool p0 is DEGRADED: no sandbox of template 'p0' could be started")
    assert told[1] == "pool p0 is OK again after 7.0 s and 10 failed starts"


async def test_the_state_is_seen_through_the_door(tmp_path: Path) -> None:
    limits = {"start_limit": 7, "start_limit_min": 7}
    made = {"p": {"backend": "fake", "warm": 1, "setup": ["/bin/false"], **limits}}
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=made)
    async with running(config) as addresses, Client(addresses[0]) as client:
        async with asyncio.timeout(30):
            while (stats := await client.get_pool("p")).state is not PoolState.DEGRADED:
                await asyncio.sleep(0.02)
        assert (stats.start_limit, "setup ended" in stats.last_failure) == (7, True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"start_limit": 4, "start_limit_min": 5}, "start_limit_min = 5: must not be above start_limit"),
        ({"warm": 4, "warm_limit": 3}, "warm_limit = 3: must not be below warm, which is 4"),
    ],
)
def test_bounds_that_cross_are_refused(keys: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, pools={"p": keys})


def test_pools_of_one_backend_share_a_pace() -> None:
    config = load(
        None,
        pools={
            "a": {"start_limit": 8},
            "b": {"start_limit": 32, "start_limit_min": 2},
            "c": {"backend": "fake", "start_limit": 100},
        },
    )
    pace = config.pace("namespace")
    assert (pace.floor, pace.ceiling, config.pace("fake").ceiling) == (2, 32, 100)
