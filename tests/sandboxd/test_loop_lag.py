"""How late an event loop is, on one whose time the test moves; and a daemon's, as Prometheus scrapes it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.telemetry.lag import INTERVAL_SECONDS, measured
from sandboxd.telemetry.settings import Wanted

from .test_metrics import found, scrape

pytestmark = pytest.mark.anyio


class Loop:
    """Comes to what is due when the test says so; implements what `lag.Loop` says."""

    def __init__(self) -> None:
        self.now = 50.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Loop:
        self.due.append((when, callback))
        return self

    def cancel(self) -> None:
        self.due.clear()

    def come(self, late: float) -> None:
        when, callback = self.due.pop()
        self.now = when + late
        callback()


def test_a_turn_that_takes_long_is_told() -> None:
    loop, told = Loop(), list[float]()
    with measured(loop, told.append):
        assert loop.due[0][0] == 50.0 + INTERVAL_SECONDS
        for late in (0.0, 2.0, 0.0):
            loop.come(late)
        assert len(loop.due) == 1
    assert told == pytest.approx([0.0, 2.0, 0.0])
    assert loop.due == []


async def test_a_daemon_tells_how_late_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pools = {"python": {"backend": "fake", "warm": 0}}
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=pools)
    async with running(config, telemetry=Wanted({}, "127.0.0.1:0")):
        (where,) = re.findall(r"metrics for Prometheus at http://(\S+)/metrics", caplog.text)
        async with asyncio.timeout(20):
            while not (counts := found(await scrape(where), "sandboxd_loop_lag_seconds_count")):
                pass
    assert counts[0] >= 1
