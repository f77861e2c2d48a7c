"""Runs that are killed with SIGKILL at random moments and resumed come to what an unharmed run comes to."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sandboxd import Client
from sandboxd.child import child_daemon
from sandboxd.run_digest import KEYS, facts
from sandboxd.runs import Run
from tests.rl.resume_proof import (
    Case,
    Children,
    check_curves,
    check_equal,
    check_once,
    children,
    draw_moments,
    kill_and_resume,
    left_behind,
)

KILLS = 10
DAEMON = """
[pools.python]
backend = "fake"
warm = 2
"""


def prove(forked: Children, directory: Path, address: str) -> None:
    """One run at bound 0, killed ten times; one at bound 1 and one of a fixed set, killed once."""
    exact, loose, few = directory / "exact", directory / "loose", directory / "few"
    for place in (exact, loose, few):
        place.mkdir()
    case = Case(exact, steps=4, address=address)
    events = forked.finish([*case.argv("whole"), "--json"], 0)
    # Its last line is for programs.
    printed = json.loads(forked.output.read_text().splitlines()[-1])
    assert printed == json.loads((case.run("whole") / "summary.json").read_text())
    assert kill_and_resume(forked, case, "killed", draw_moments(events, KILLS, seed=5)) == KILLS
    check_equal(case.run("whole"), case.run("killed"))
    bounded = Case(loose, steps=3, bound=1, address=address)
    kill_and_resume(forked, bounded, "killed", [events // 3])
    fixed = Case(few, steps=4, address=address, fixed=True)
    kill_and_resume(forked, fixed, "killed", [events // 3])
    passed_over = [check_once(each.run("killed"), each) for each in (case, bounded, fixed)]
    assert (passed_over[:2], passed_over[2] > 0) == ([0, 0], True)
    for each in (case, bounded, fixed):
        check_curves(each.run("killed"), each)
        assert left_behind(forked, each) == []


async def check_shown(run: Path) -> None:
    """The live page and `sandboxd top` name no metric that a run does not write."""
    shown = Run(run)
    assert await shown.look()
    head = shown.head()
    assert set(head["latest"]) >= KEYS
    assert [title for title, value in facts(head["latest"]) if value == "-"] == []
    assert {"all", "sums"} <= set(head["families"])


@pytest.mark.timeout(240)
def test_each_task_is_trained_once_however_often_the_run_is_killed(tmp_path: Path) -> None:
    settings = tmp_path / "daemon.toml"
    settings.write_text(DAEMON)

    async def body() -> None:
        async with child_daemon(tmp_path / "d", config=settings) as address, Client(address) as client:
            with children(tmp_path / "output") as forked:
                await asyncio.to_thread(prove, forked, tmp_path, address)
            await check_shown(tmp_path / "exact" / "runs" / "whole")
            # Nobody gave back what the killed runs had leased: that ends with its time.
            async with asyncio.timeout(20):
                async for pool in client.watch_pool("python"):
                    if pool.active == 0:
                        break

    asyncio.run(body())
