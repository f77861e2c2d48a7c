"""How many are kept ready: what arrives while others start, bursts remembered, announcements in time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable

import pytest

from sandboxd.announcements import Announcement, StartSpeed
from sandboxd.sizing import HALVING_SECONDS, MEMORY_SECONDS, Sizing


def waits(sizing: Sizing, arrivals: Iterable[float], start_seconds: float) -> list[float]:
    """How long each of these waits for a sandbox of a pool that starts as many at once as it is short of."""
    ready_at: list[float] = []
    waited = []
    for now in arrivals:
        # What falls is thrown away, newest first; what is short begins now.
        target = sizing.target(now)
        ready_at = sorted(ready_at)[:target]
        sizing.arrived(now)
        for _ in range(max(0, sizing.target(now) + 1 - len(ready_at))):
            heapq.heappush(ready_at, now + start_seconds)
        waited.append(max(0.0, heapq.heappop(ready_at) - now))
    return waited


def poisson(rate: float, count: int, seed: int = 1) -> list[float]:
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def test_is_the_floor_where_floor_and_ceiling_are_equal() -> None:
    sizing = Sizing(5, 5)
    for second in range(100):
        sizing.arrived(second, 50)
    assert (sizing.target(100.0), sizing.changes_at(100.0)) == (5, None)


def test_a_steady_stream_is_covered_for_the_time_that_a_start_takes() -> None:
    sizing = Sizing(1, 100, start_seconds=2.0)
    for number in range(3000):
        sizing.arrived(number / 10)
    # Ten a second for two seconds, and the root of that for the scatter.
    assert 20 <= sizing.target(300.0) <= 26


def test_hardly_anybody_waits_at_random_arrivals() -> None:
    sizing = Sizing(1, 100, start_seconds=1.0)
    waited = waits(sizing, poisson(10.0, 3000), 1.0)[300:]
    assert sum(wait > 0 for wait in waited) / len(waited) < 0.1
    scarce = waits(Sizing(1, 1), poisson(10.0, 3000), 1.0)[300:]
    assert sum(wait > 0 for wait in scarce) / len(scarce) > 0.9


def test_groups_are_covered_whole() -> None:
    sizing = Sizing(0, 100, start_seconds=1.0)
    for second in range(0, 100, 10):
        sizing.arrived(float(second), 16)
    assert sizing.target(91.0) >= 16


def test_a_pause_between_bursts_throws_little_away() -> None:
    sizing = Sizing(0, 64, start_seconds=1.0)
    sizing.arrived(0.0, 64)
    assert sizing.target(0.0) == 64
    assert sizing.target(15.0) >= 50
    assert sizing.target(HALVING_SECONDS) == 32
    assert sizing.target(20 * HALVING_SECONDS) == 0


def test_says_when_it_will_fall_and_falls_then_by_one() -> None:
    sizing = Sizing(2, 8, start_seconds=1.0)
    sizing.arrived(0.0, 6)
    now, seen = 0.0, [sizing.target(0.0)]
    while (later := sizing.changes_at(now)) is not None:
        assert later > now
        now = later
        seen.append(sizing.target(now))
    assert seen == [6, 5, 4, 3, 2]


def test_a_target_of_nothing_is_reached() -> None:
    sizing = Sizing(0, 8, start_seconds=1.0)
    sizing.arrived(0.0)
    later = sizing.changes_at(0.0)
    assert later is not None
    assert (sizing.target(0.0), sizing.target(later), sizing.changes_at(later)) == (1, 0, None)


def test_the_ceiling_holds_and_is_left_without_delay() -> None:
    sizing = Sizing(0, 10, start_seconds=1.0)
    sizing.arrived(0.0, 10_000)
    assert (sizing.target(0.0), sizing.target(HALVING_SECONDS)) == (10, 5)


def test_the_rate_is_that_of_late() -> None:
    sizing = Sizing(0, 10)
    for number in range(10_000):
        sizing.arrived(number / 20)
    assert sizing.rate(500.0) == pytest.approx(20, rel=0.05)
    assert sizing.rate(500.0 + MEMORY_SECONDS) == pytest.approx(20 / 2.718, rel=0.05)


def test_what_is_announced_is_used_up_by_those_who_come() -> None:
    sizing = Sizing(1, 8, start_seconds=1.0)
    sizing.announcements.add(Announcement("a", 10, due=1.0, expiry=60.0))
    assert sizing.target(0.0) == 1 + 10
    sizing.arrived(1.0, 4)
    assert sizing.target(1.0) == 1 + 6
    sizing.arrived(2.0, 9)
    # Three were not announced: these count as demand.
    assert sizing.target(2.0) == 3


def test_what_is_announced_changes_the_target_and_what_is_demanded_too() -> None:
    sizing = Sizing(0, 8, start_seconds=1.0, speed=StartSpeed(10.0, 1.0))
    sizing.announcements.add(Announcement("a", 10, due=500.0, expiry=600.0))
    begin = sizing.announcements.begin("a", sizing.speed)
    assert sizing.changes_at(0.0) == begin
    sizing.arrived(0.0, 4)
    assert 0.0 < (sizing.changes_at(0.0) or 0.0) < begin
    assert sizing.target(begin) == 10
    sizing.stop()
    assert (sizing.target(begin), sizing.changes_at(begin)) == (0, None)
