"""What a soak calls growth."""

from __future__ import annotations

import pytest

from sandboxd.bench.soak import BOUNDS, LATENCY_BOUNDS, Options, growth_of

OPTIONS = Options()
MEGABYTE = 1 << 20


def looks(options: Options, **slopes: float) -> list[dict[str, float]]:
    """A soak in which each measure begins at its own level and grows by so much in 1,000 cycles."""
    levels = {**dict.fromkeys(BOUNDS, 100.0 * MEGABYTE), **dict.fromkeys(LATENCY_BOUNDS, 0.1)}
    return [
        {
            "cycles": cycles,
            **{name: level + slopes.get(name, 0) * cycles / 1000 for name, level in levels.items()},
        }
        for cycles in range(options.every, options.cycles + 1, options.every)
    ]


def growing(options: Options, seen: list[dict[str, float]]) -> set[str]:
    return {name for name, growth in growth_of(seen, options).items() if not growth["flat"]}


def test_what_stays_is_flat() -> None:
    assert growing(OPTIONS, looks(OPTIONS)) == set()


@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("daemon_rss_bytes", 100 << 10),
        ("daemon_fds", 0.1),
        ("daemon_threads", 0.1),
        ("launcher_rss_bytes", 100 << 10),
        ("launcher_fds", 0.1),
        ("p50_s", 0.001),
        ("p99_s", 0.003),
    ],
)
def test_a_leak_is_found_and_no_other_is_blamed(name: str, slope: float) -> None:
    assert growing(OPTIONS, looks(OPTIONS, **{name: slope})) == {name}


@pytest.mark.parametrize("cycles", [50_000, 100_000])
def test_a_hundred_bytes_a_cycle_are_a_leak_however_much_comes_and_goes(cycles: int) -> None:
    options = Options(cycles=cycles)
    steady, leaking = looks(options), looks(options, daemon_rss_bytes=100_000)
    for number, pair in enumerate(zip(steady, leaking, strict=True)):
        for look in pair:
            look["daemon_rss_bytes"] += 300_000 * (number * 7 % 11) / 11
    assert growing(options, steady) == set()
    assert growing(options, leaking) == {"daemon_rss_bytes"}


@pytest.mark.parametrize("full_at", [10_000, 30_000, 50_000])
def test_what_is_full_after_half_of_it_is_no_growth(full_at: int) -> None:
    seen = looks(OPTIONS)
    for look in seen:
        look["daemon_rss_bytes"] -= max(0, full_at - look["cycles"]) * 1000
    assert growing(OPTIONS, seen) == set()


def test_a_table_that_is_made_larger_once_is_no_growth() -> None:
    seen = looks(OPTIONS)
    for look in seen:
        look["daemon_rss_bytes"] += MEGABYTE if look["cycles"] > 75_000 else 0
    assert growing(OPTIONS, seen) == set()


def test_what_still_fills_at_the_end_is_growth() -> None:
    seen = looks(OPTIONS)
    for look in seen:
        look["daemon_rss_bytes"] -= max(0, 95_000 - look["cycles"]) * 100
    assert growing(OPTIONS, seen) == {"daemon_rss_bytes"}


def test_a_short_run_says_nothing_of_latency_nor_of_little() -> None:
    few = Options(cycles=300)
    assert growing(few, looks(few, p50_s=10.0, daemon_rss_bytes=4 * MEGABYTE, daemon_fds=10)) == set()
    assert growing(few, looks(few, daemon_fds=20, daemon_rss_bytes=40 * MEGABYTE)) == {
        "daemon_fds",
        "daemon_rss_bytes",
    }


def test_a_soak_of_one_look_says_nothing() -> None:
    one = Options(cycles=10, callers=16)
    assert growth_of(looks(one)[:1], one) == {}
