"""A run adapts its concurrency to its sandboxes and says so; a pool that cannot be watched ends nothing."""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.generator import GeneratorStats
from rl.generators.fake import ByteTokenizer, FakeGenerator, sums_reply
from rl.metrics import Row
from rl.pace import CountedRollout, Paced, Pacemaker
from rl.plan import Plan
from rl.types import Episode, Scored, StopReason, Task, TokenIds, Unscored
from sandboxd import Client, PoolStats
from sandboxd.config import load
from sandboxd.daemon import running
from tests.rl.harness import AddingSandboxes, Rig
from tests.sandboxd.conftest import daemon_process
from tests.source_tree import ROOT

COUNTS: dict[str, Any] = dict.fromkeys(
    (
        *("warm_target", "size_limit", "starting", "warm", "active", "waiting", "deleting"),
        *("acquired_total", "released_total", "expired_total", "lost_total", "started_total"),
        "start_failures_total",
    ),
    0,
)
POOL = PoolStats(**COUNTS, start_seconds=None)


class Scripted:
    """Plays nothing: its episodes end as they are told to."""

    def __init__(self, *episodes: Episode) -> None:
        self._left = list(episodes)

    def prompt(self, task: Task) -> TokenIds:
        raise AssertionError

    async def run(self, task: Task) -> Episode:
        return self._left.pop(0)


def paced(rig: Rig) -> Paced:
    return Paced(rig.player, rig.rollout, rig.generator, rig.buffer, rig.plan.groups_per_batch)


def test_a_run_whose_sandboxes_fail_plays_fewer_episodes_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    rig = Rig(
        tmp_path,
        plan=Plan(steps=8, groups_per_batch=2, samples_per_group=6),
        concurrent=12,
        sandboxes=AddingSandboxes(lambda number: number % 2 == 0),
    )
    minutes = itertools.count()
    pace = Pacemaker(paced(rig), said.append, clock=lambda: 60.0 * next(minutes))

    async def look(row: Row) -> None:
        pace.look(POOL)

    rig.on_step = look
    asyncio.run(rig.loop.run())
    assert rig.loop.step == 8
    assert rig.player.limit < 12
    assert any("lost to infrastructure" in line for line in said)
    assert said == [str(change) for change in pace.changes]
    assert pace.row()["concurrency/max_inflight"] == rig.player.limit
    assert pace.row()["concurrency/cuts"] >= 1
    rig.ledger.check()


FAILING = """
faults = ["die 0.4"]
[fake]
start_seconds = 0.1
[pools.python]
backend = "fake"
warm = 4
start_limit = 4
"""
RUN = """
name = "paced"
runs_dir = "{folder}"
steps = 6
families = ["sums"]
groups_per_batch = 2
samples_per_group = 6
concurrent_episodes = 12
checkpoint_every_steps = 0
[trainer]
backend = "fake"
[generator]
backend = "fake"
[sandboxes]
address = "{address}"
[heldout]
per_kind = 1
per_level = 1
"""


def test_whoever_reads_the_output_the_summary_or_the_report_is_told_why(tmp_path: Path) -> None:
    """72 sandboxes at least, four at a time in a tenth of a second: the pool is heard of meanwhile."""
    run = tmp_path / "paced"
    (tmp_path / "d").mkdir()
    settings = tmp_path / "run.toml"
    with daemon_process(tmp_path / "d", FAILING) as address:
        settings.write_text(RUN.format(folder=tmp_path, address=address))
        command = [sys.executable, "-m", "rl", "train", str(settings)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    changes = json.loads((run / "summary.json").read_text())["concurrency"]
    (cut, *_) = [each for each in changes if "were lost to infrastructure" in each["reason"]]
    assert cut["before"] > cut["after"]
    said = f"episodes at once: {cut['before']} → {cut['after']}, for {cut['reason']}"
    assert said in " ".join(done.stdout.split())
    assert html.escape(cut["reason"]) in (run / "report.html").read_text()


def test_with_adapting_off_it_only_measures(tmp_path: Path) -> None:
    rig, told = Rig(tmp_path), list[Row]()
    pace = Pacemaker(paced(rig), print, adapt=False, tell=told.append, clock=lambda: 0.0)
    pace.look(replace(POOL, waiting=9, oldest_wait_seconds=500.0))
    assert rig.player.limit == 64
    assert told[0]["sandbox/oldest_wait_s"] == 500.0
    assert told[0]["rollout/inflight"] == 0.0


def test_only_what_infrastructure_is_to_blame_for_counts_as_lost() -> None:
    task = Task("k", "f", 0, "q", "a")
    outcomes = (Unscored("SANDBOX_LOST", "exec", ""), Unscored("VERIFIER", "verify", ""), Scored(0.0))
    rollout = CountedRollout(Scripted(*(Episode(task, (), each, StopReason.COMPLETED) for each in outcomes)))

    async def body() -> None:
        for _ in outcomes:
            await rollout.run(task)

    asyncio.run(body())
    assert (rollout.lost, rollout.scored) == (1, 1)


def test_the_pool_is_watched_and_one_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    rig, said = Rig(tmp_path), list[str]()
    config = load(None, state_dir=tmp_path / "d", drain_seconds=0.2, pools={"python": {"backend": "fake"}})

    async def body() -> None:
        looked, done = asyncio.Event(), asyncio.Event()

        def say(line: str) -> None:
            said.append(line)
            done.set()

        pace = Pacemaker(paced(rig), say, tell=lambda row: looked.set(), clock=lambda: 0.0)
        async with running(config) as addresses, Client(addresses[0]) as client, asyncio.timeout(20):
            async with pace.running(client, "python"):
                await looked.wait()
            assert said == []
            async with pace.running(client, "nowhere"):
                await done.wait()

    asyncio.run(body())
    assert len(said) == 1
    assert said[0].startswith("episodes at once: 64 from now on, for the pool cannot be watched: ")


def test_a_steps_row_has_the_most_that_was_seen_since_the_step_before(tmp_path: Path) -> None:
    """When a step ends, what ran in it has ended, too."""
    rig = Rig(tmp_path)
    engine = Busy()
    pace = Pacemaker(replace(paced(rig), generator=engine), lambda line: None, adapt=False)
    engine.numbers = GeneratorStats(kv_cache_usage=0.9, queued=7)
    pace.look(replace(POOL, waiting=3))
    engine.numbers = GeneratorStats()
    pace.look(POOL)
    names = ("inference/kv_cache_usage_max", "inference/requests_waiting_max", "sandbox/waiting_max")
    first, second = pace.step_row(), pace.step_row()
    assert [first[name] for name in names] == [0.9, 7.0, 3.0]
    assert [second[name] for name in names] == [0.0] * 3
    assert first["inference/kv_cache_usage_perc"] == 0.0
    assert "buffer/depth" not in first, "the loop's own, of another moment"


class Busy(FakeGenerator):
    """Says of itself what it is told to."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer(), sums_reply(lambda version: 0.5))
        self.numbers = GeneratorStats()

    def stats(self) -> GeneratorStats:
        return self.numbers
