"""The limit on starts at once: on simulated hosts it comes near the best fixed one, and backs off."""

from __future__ import annotations

import pytest

from sandboxd.pacing import Bucket, Pace
from tests.sandboxd.host_kit import CAPACITY, Host, engine, processors, waiting

LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
HOSTS = {
    "two processors": processors(2),
    "eight processors": processors(8),
    "thirty-two processors": processors(32),
    "an engine that gets worse": engine,
    "starts that wait": waiting,
}


def fixed(limit: int) -> Pace:
    return Pace(floor=limit, ceiling=limit)


def adaptive(first: int = 4) -> Pace:
    return Pace(ceiling=64, first=first)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HOSTS)
def test_comes_within_a_fifth_of_the_best_fixed_limit(name: str, seed: int) -> None:
    host = Host(HOSTS[name], seed=seed)
    best = max(host.run(fixed(limit), 500) for limit in LIMITS)
    assert host.run(adaptive(), 2000, since=500) >= 0.8 * best


@pytest.mark.parametrize("name", ["two processors", "eight processors", "an engine that gets worse"])
def test_a_short_burst_needs_no_more_than_it_teaches(name: str) -> None:
    """The time that the limit takes to settle is counted, too."""
    host = Host(HOSTS[name])
    best = max(host.run(fixed(limit), 200) for limit in LIMITS)
    assert host.run(adaptive(), 200) >= 0.8 * best


@pytest.mark.parametrize("first", [1, 4, 64])
@pytest.mark.parametrize("above", [2, 8, 20])
def test_finds_the_number_above_which_starts_fail(above: int, first: int) -> None:
    host, pace = Host(waiting, fails_above=above), adaptive(first)
    best = max(host.run(fixed(limit), 500) for limit in range(1, above + 1))
    assert host.run(pace, 1000, since=500) >= 0.8 * best
    assert pace.limit <= 1.25 * above


def test_failures_at_any_limit_do_not_bring_it_down() -> None:
    host = Host(processors(8), fail_rate=0.2)
    best = max(host.run(fixed(limit), 500) for limit in LIMITS)
    assert host.run(adaptive(), 2000, since=500) >= 0.8 * best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["two processors", "eight processors", "thirty-two processors"])
def test_starts_that_hang_do_not_bring_it_down(name: str, seed: int) -> None:
    """One in twenty holds its slot for a hundred times as long as another: more at once make up for these."""
    host = Host(HOSTS[name], fail_rate=0.2, hang_rate=0.05, hang_seconds=100.0, seed=seed)
    best = max(host.run(fixed(limit), 1500, since=500) for limit in LIMITS)
    assert host.run(adaptive(), 1500, since=500) >= 0.75 * best


def test_one_that_hangs_leaves_its_place_to_another() -> None:
    pace = Pace(ceiling=12, first=8)
    for attempt in [pace.begin(0.0) for _ in range(8)]:
        pace.end(attempt, 1.0, ok=True)
    limit = pace.limit
    hanging = [pace.begin(2.0) for _ in range(limit)]
    assert pace.free(limit) == 0
    due = pace.overdue_at(2.0)
    assert due is not None
    assert due > 4.0
    assert pace.overdue_at(due) is None
    # But no more than the settings allow in all.
    assert pace.free(limit) == 12 - limit
    for attempt in hanging:
        pace.end(attempt, due + 1, ok=True)
    assert pace.free(0) == pace.limit


def test_backs_off_when_most_starts_hang() -> None:
    pace = adaptive(16)
    for attempt in [pace.begin(0.0) for _ in range(16)]:
        pace.end(attempt, 30.0, ok=False)
    assert pace.limit <= 8


def slowing(capacity: CAPACITY, after: float, times: float) -> CAPACITY:
    return lambda at_once, now: capacity(at_once, now) / (times if now > after else 1.0)


@pytest.mark.parametrize("name", HOSTS)
def test_backs_off_when_the_host_slows_tenfold_and_finds_its_way_again(name: str) -> None:
    capacity = HOSTS[name]
    before, after = adaptive(), adaptive()
    Host(capacity).run(before, 1500)
    assert before.backed_off_total == 0
    host = Host(slowing(capacity, after=100.0, times=10.0))
    fast = int(100 * capacity(64, 0.0))
    best = max(host.run(fixed(limit), fast + 1500, since=fast + 500) for limit in LIMITS)
    assert host.run(after, fast + 1500, since=fast + 500) >= 0.75 * best
    assert after.backed_off_total >= 1


def test_halves_at_once_when_most_starts_fail() -> None:
    pace = adaptive(16)
    for attempt in [pace.begin(0.0) for _ in range(16)][:8]:
        pace.end(attempt, 1.0, ok=False)
    assert (pace.limit, pace.backed_off_total) == (8, 1)


def test_starts_that_were_cancelled_say_nothing() -> None:
    pace = adaptive(4)
    for _ in range(100):
        pace.end(pace.begin(0.0), 1.0, ok=None)
    assert pace.limit == 4


def test_a_pool_that_seldom_starts_anything_leaves_it_alone() -> None:
    pace = adaptive(8)
    for second in range(200):
        pace.end(pace.begin(second), second + 0.9, ok=True)
    assert (pace.limit, pace.rate) == (8, None)


def test_learns_from_bursts_too_short_to_fill_a_round() -> None:
    pace = adaptive(4)
    for burst in range(10):
        for attempt in [pace.begin(10.0 * burst) for _ in range(pace.limit)]:
            pace.end(attempt, 10.0 * burst + 1.0, ok=True)
    assert pace.limit > 16


def test_stays_between_its_bounds() -> None:
    pace = Pace(floor=3, ceiling=5, first=4)
    assert Host(processors(32)).run(pace, 300) > 0
    assert 3 <= pace.limit <= 5
    assert (fixed(7).limit, Pace(ceiling=2, first=9).limit, Pace(ceiling=9, first=0).limit) == (7, 2, 9)


def test_a_bucket_lets_one_seconds_worth_begin_at_once_and_then_so_many_a_second() -> None:
    bucket = Bucket(4.0)
    assert bucket.available(10.0) == 4
    assert bucket.take(10.0, 4) == 0.0
    assert bucket.available(10.1) == 0
    assert bucket.next_at(10.1) == pytest.approx(10.25)
    assert bucket.available(10.25) == 1
    assert bucket.available(99.0) == 4


def test_a_bucket_says_how_long_those_beyond_it_wait() -> None:
    bucket = Bucket(2.0)
    assert bucket.take(0.0, 5) == pytest.approx(1.5)
    assert bucket.available(1.0) == 0
    assert bucket.next_at(1.0) == pytest.approx(2.0)


def test_a_slow_bucket_lets_one_begin() -> None:
    bucket = Bucket(0.1)
    assert bucket.available(0.0) == 1
    bucket.take(0.0)
    assert bucket.next_at(0.0) == pytest.approx(10.0)


def test_without_a_rate_a_bucket_bounds_nothing() -> None:
    bucket = Bucket()
    assert (bucket.available(0.0), bucket.take(0.0, 1000), bucket.next_at(0.0)) == (None, 0.0, 0.0)
