"""The controller of concurrency against simulated sandboxes, engines and trainers, on a clock of its own."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import pytest

from rl.concurrency import Change, ConcurrencyController, Signals
from rl.permits import Permits

TICK = 0.5


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Plant:
    """Episodes of `seconds` each that need one of the `sandboxes` all along; those that wait for one longer
    than `patience` are lost, and so is each in a sandbox with the chance `failing`. An engine holds `cache`
    episodes and preempts beyond. `demand` episodes want to run."""

    sandboxes: int = 1000
    seconds: float = 10.0
    patience: float = 60.0
    failing: float = 0.0
    cache: int = 1000
    demand: int = 1000
    ready: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.controller = ConcurrencyController(64, self.clock)
        self.changes: list[Change] = []
        self._rng = random.Random(1)
        self._playing: list[float] = []
        self._waiting: list[float] = []
        self._scored = self._lost = self._preemptions = 0

    def run(self, seconds: float) -> list[int]:
        """The limit at each tick."""
        limits = []
        for _ in range(int(seconds / TICK)):
            self._pass_time()
            change = self.controller.update(self._signals())
            self.changes += [change] if change else []
            limits.append(self.controller.limit)
        return limits

    def _pass_time(self) -> None:
        self.clock.now += TICK
        now = self.clock.now
        ended = sum(until <= now for until in self._playing)
        failed = sum(self._rng.random() < self.failing for _ in range(ended))
        given_up = sum(now - since > self.patience for since in self._waiting)
        self._playing = [until for until in self._playing if until > now]
        self._waiting = [since for since in self._waiting if now - since <= self.patience]
        self._scored += ended - failed
        self._lost += failed + given_up
        while self._waiting and len(self._playing) < self.sandboxes:
            self._waiting.pop(0)
            self._playing.append(now + self.seconds * self._rng.uniform(0.5, 1.5))
        while self._running < min(self.controller.limit, self.demand):
            self._waiting.append(now)
        self._preemptions += max(0, self._running - self.cache)

    @property
    def _running(self) -> int:
        return len(self._playing) + len(self._waiting)

    def _signals(self) -> Signals:
        oldest = self.clock.now - min(self._waiting, default=self.clock.now)
        return Signals(
            running=self._running,
            scored=self._scored,
            lost=self._lost,
            ready=self.ready,
            kv_usage=min(1.0, self._running / self.cache),
            preemptions=self._preemptions,
            waiting=len(self._waiting),
            oldest_wait=oldest,
        )


def test_where_all_keep_up_nothing_is_ever_changed() -> None:
    plant = Plant()
    assert set(plant.run(600)) == {64}
    assert plant.changes == []


def test_too_few_sandboxes_bring_it_down_to_their_number_and_nothing_is_lost() -> None:
    plant = Plant(sandboxes=20)
    plant.run(120)
    settled = plant.run(1200)
    assert min(settled) >= 12
    assert max(settled) <= 30
    assert 16 <= sum(settled) / len(settled) <= 24
    assert plant._lost == 0
    assert "wait for a sandbox, the first for" in plant.changes[0].reason


def test_without_it_most_of_those_episodes_would_be_lost() -> None:
    """The plant is as hard as it claims: a limit that stays starves whoever waits too long."""
    plant = Plant(sandboxes=4)
    plant.controller = ConcurrencyController(64, lambda: 0.0)
    plant.controller._changed_at = 0.0  # a clock that stands: no cut is ever due
    assert set(plant.run(300)) == {64}
    assert plant._lost > plant._scored


def test_sandboxes_that_come_back_are_used_again() -> None:
    plant = Plant(sandboxes=10)
    plant.run(400)
    assert plant.controller.limit <= 16
    plant.sandboxes = 1000
    assert plant.run(1500)[-1] == 64
    assert str(plant.changes[-1]).endswith(" → 64, for all of them ended well")


def test_sandboxes_that_fail_bring_it_down_and_those_that_are_mended_up() -> None:
    plant = Plant(failing=0.6)
    plant.run(200)
    assert plant.controller.limit <= 8
    assert "lost to infrastructure" in plant.changes[0].reason
    plant.failing = 0.0
    assert plant.run(2000)[-1] == 64


def test_a_failure_now_and_then_changes_nothing() -> None:
    plant = Plant(failing=0.02)
    assert min(plant.run(1200)) >= 50


def test_a_full_cache_keeps_it_below_what_preempts() -> None:
    plant = Plant(cache=30)
    plant.run(60)
    settled = plant.run(900)
    assert max(settled) <= 30
    assert min(settled) >= 12
    assert {"preempted" in change.reason or "full" in change.reason for change in plant.changes} == {True}
    before = plant._preemptions
    plant.run(300)
    assert plant._preemptions == before


def test_what_is_not_used_up_is_not_raised() -> None:
    plant = Plant(sandboxes=10)
    plant.run(300)
    low = plant.controller.limit
    plant.sandboxes, plant.demand = 1000, low - 2
    assert plant.run(600)[-1] <= low + 4, "one raise for those that were still running"


def test_a_trainer_that_has_a_batch_in_stock_needs_no_more() -> None:
    plant = Plant(sandboxes=10)
    plant.run(300)
    low = plant.controller.limit
    plant.sandboxes, plant.ready = 1000, 1
    assert plant.run(300)[-1] == low


def test_the_engines_queue_is_cut_only_when_it_stays() -> None:
    clock = Clock()
    controller = ConcurrencyController(64, clock)
    calm, queue = Signals(running=64, scored=100), Signals(running=64, scored=100, queued=40)
    clock.now += 10
    assert [controller.update(seen) for seen in (calm, queue, calm)] == [None] * 3
    assert controller.update(queue) is None
    assert controller.update(queue) is not None
    assert controller.limit == 57


def test_a_cut_waits_for_the_one_before_to_show() -> None:
    clock = Clock()
    controller = ConcurrencyController(64, clock)
    full = Signals(running=64, kv_usage=0.95)
    assert controller.update(full) == Change(100.0, 64, 57, "the engine's cache is 95% full")
    clock.now += 60
    assert controller.update(full) is None, "64 still run"
    assert controller.update(replace(full, running=57)) is not None
    assert controller.update(replace(full, running=51)) is None, "too soon"


def test_a_low_limit_rises_by_a_part_of_itself() -> None:
    """What was seen on a real engine with a small cache: a sixteenth of 120 doubled 8, and was cut again."""
    clock = Clock()
    controller = ConcurrencyController(120, clock)
    seen = Signals(running=9, kv_usage=0.95, preemptions=3)
    change = controller.update(replace(seen, preemptions=0))
    assert change is not None
    assert (change.after, change.reason) == (8, "the engine's cache is 95% full, with 9 under way")
    clock.now += 60
    change = controller.update(replace(seen, running=8))
    assert change is not None
    assert (change.after, change.reason) == (6, "the engine preempted 3, its cache 95% full")
    clock.now += 60
    controller.update(replace(seen, running=6))
    limits = []
    for scored in range(100, 600, 100):
        clock.now += 60
        controller.update(Signals(running=controller.limit, scored=scored, preemptions=3))
        limits.append(controller.limit)
    assert limits == [7, 9, 12, 15, 19]


def test_preemptions_while_a_cut_was_to_show_are_told_with_the_next() -> None:
    clock = Clock()
    controller = ConcurrencyController(64, clock)
    full = Signals(running=64, kv_usage=0.95)
    controller.update(full)
    controller.update(replace(full, preemptions=2))
    clock.now += 60
    change = controller.update(replace(full, running=57, preemptions=2))
    assert change is not None
    assert change.reason == "the engine's cache is 95% full, and 2 were preempted since the last change"


def test_it_never_goes_below_one() -> None:
    clock = Clock()
    controller = ConcurrencyController(2, clock)
    for _ in range(20):
        clock.now += 60
        controller.update(Signals(running=1, kv_usage=0.95))
    assert controller.limit == 1
    assert controller.cuts == 1


@pytest.mark.parametrize("limits", [(2, 1, 3), (1, 1, 1), (5, 2, 1)])
def test_permits_never_exceed_a_limit_that_moves(limits: tuple[int, ...]) -> None:
    async def body() -> None:
        permits = Permits(limits[0])
        held, order = 0, []

        async def one(number: int) -> None:
            nonlocal held
            async with permits:
                held += 1
                order.append(number)
                assert held <= max(limits)
                for _ in range(3):
                    await asyncio.sleep(0)
                held -= 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(30):
                tasks.create_task(one(number))
            for limit in limits:
                for _ in range(10):
                    await asyncio.sleep(0)
                permits.limit = limit
        assert order == list(range(30)), "first come, first served"
        assert (held, permits.waiting) == (0, 0)

    asyncio.run(body())


def test_a_permit_given_up_in_the_moment_that_it_is_granted_goes_to_the_next() -> None:
    async def body() -> None:
        permits = Permits(1)

        async def hold() -> None:
            async with permits:
                await asyncio.Event().wait()

        async def pass_through() -> None:
            async with permits:
                pass

        first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
        third = asyncio.create_task(pass_through())
        await asyncio.sleep(0)
        assert permits.waiting == 2
        first.cancel()
        await asyncio.sleep(0)
        second.cancel()  # granted by now, though it does not know it
        async with asyncio.timeout(20):
            await third
        await asyncio.wait([first, second])
        assert permits.waiting == 0

    asyncio.run(body())


def test_a_permit_that_becomes_free_while_the_only_waiter_gives_up_goes_to_whoever_comes() -> None:
    """All three in one turn of the event loop: the newcomer queues behind a waiter that is about to leave."""

    async def body() -> None:
        permits = Permits(1)

        async def take() -> None:
            async with permits:
                pass

        async with asyncio.timeout(20):
            async with permits:
                waiter = asyncio.create_task(take())
                await asyncio.sleep(0)
                assert permits.waiting == 1
                waiter.cancel()
            await take()
            await asyncio.wait([waiter])
        assert permits.waiting == 0

    asyncio.run(body())


def test_a_waiter_that_gives_up_leaves_the_queue() -> None:
    async def body() -> None:
        permits = Permits(0)

        async def take() -> None:
            async with permits:
                pass

        waiter = asyncio.create_task(take())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert permits.waiting == 0

    asyncio.run(body())
