"""How late the event loop is, as a percentile of the time that passed and not of the measurements made."""

from __future__ import annotations

import asyncio

import pytest

from rl.loop_lag import LoopLag


def test_a_loop_that_stood_still_counts_for_all_the_moments_that_it_missed() -> None:
    lag = LoopLag(interval=0.1)
    for _ in range(99):
        lag.note(0.0)
    lag.note(1.05)
    row = lag.row()
    assert row["loop/lag_max_s"] == 1.05
    # 110 moments, of which the last eleven were 1.05, 0.95, … late.
    assert row["loop/lag_p99_s"] == pytest.approx(0.95)
    assert lag.row() == {"loop/lag_p99_s": 0.0, "loop/lag_max_s": 0.0}


def test_rare_lateness_is_not_the_99th_percentile() -> None:
    lag = LoopLag(interval=0.1)
    for late in (*[0.001] * 299, 0.09):
        lag.note(late)
    assert lag.row() == {"loop/lag_p99_s": 0.001, "loop/lag_max_s": 0.09}


def test_what_blocks_the_loop_is_seen_at_once() -> None:
    now = 100.0

    async def body() -> list[float]:
        nonlocal now
        lag = LoopLag(clock=lambda: now)
        async with lag.running():
            await asyncio.sleep(0)
            now += 0.2  # and the loop did not run meanwhile
            return [lag.row()["loop/lag_max_s"], lag.row()["loop/lag_max_s"]]

    assert asyncio.run(body()) == [pytest.approx(0.18), 0.0]
