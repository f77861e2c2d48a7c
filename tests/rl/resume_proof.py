"""Kills runs at random moments, resumes them, and compares what they come to with runs that nobody killed.

python -m tests.rl.resume_proof --kills 100 --seed 1            (a long form of tests/rl/test_resume.py)
python -m tests.rl.resume_proof --kills 10 --steps 4 --torch    (a real trainer: weights equal to the bit)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rl.checkpoint import LoopState, newest_checkpoint, read_state
from rl.config import load
from rl.model import SMOLLM2, build_tiny_model, prepare_model
from rl.run import task_source
from rl.tasks.source import SEEDS_OF_A_RUN
from rl.weights import PREFIX, SHARED_MEMORY

ROOT = Path(__file__).parents[2]

SETTINGS = """
name = "run"
seed = {seed}
steps = {steps}
families = [{family}]
groups_per_batch = 2
samples_per_group = 2
staleness_bound = {bound}
# One after the other: then the order in which groups end is the same in every run.
concurrent_episodes = {concurrent}
checkpoint_every_steps = 1
model = {model}
[trainer]
backend = {trainer}
[generator]
backend = "fake"
[episode]
turn_tokens = 200
context_tokens = 4000
[sandboxes]
address = {address}
backend = "fake"
warm = 2
ttl_seconds = 2
[heldout]
per_kind = 1
per_level = 1
[curriculum]
{curriculum}
"""
FEW_SUMS = "tests.rl.few_sums:FewSums"
RESTING = "low = 0.2\nhigh = 0.8\nmemory = 2\nrest = 1"
"""Of a fixed set rests for an epoch whatever its two samples solved alike."""


@dataclass(frozen=True)
class Case:
    """What is run: `bound` 0 plays episodes one after the other, so all runs of a seed are equal. `fixed`
    takes tasks of a fixed set, of which some rest."""

    directory: Path
    steps: int = 5
    seed: int = 0
    bound: int = 0
    address: str = ""
    model: Path | None = None
    fixed: bool = False

    @property
    def settings(self) -> Path:
        return self.directory / "run.toml"

    def argv(self, name: str) -> list[str]:
        """The command line; settings are written when they are not there."""
        values = {
            "family": json.dumps(FEW_SUMS if self.fixed else "sums"),
            "curriculum": RESTING if self.fixed else "",
            "trainer": json.dumps("torch" if self.model else "fake"),
            "address": json.dumps(self.address),
            "model": json.dumps(str(self.model or "none")),
            "concurrent": 8 if self.bound else 1,
        }
        self.settings.write_text(
            SETTINGS.format(seed=self.seed, steps=self.steps, bound=self.bound, **values)
        )
        return ["train", str(self.settings), "--runs-dir", str(self.directory / "runs"), "--name", name]

    def run(self, name: str) -> Path:
        return self.directory / "runs" / name


@dataclass
class Children:
    """Forks runs, see `tests.rl.killed_runs`. `pids` are those of all of them so far."""

    server: subprocess.Popen[str]
    output: Path
    pids: list[int] = field(default_factory=list)

    def run(self, argv: list[str], kill_at: int | None = None) -> tuple[int, int]:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        order = {"argv": argv, "kill_at": kill_at, "output": str(self.output)}
        print(json.dumps(order), file=self.server.stdin, flush=True)
        pid, status, events = json.loads(self.server.stdout.readline())
        self.pids.append(pid)
        return status, events

    def finish(self, argv: list[str], kill_at: int | None = None) -> int:
        """Runs to the end; returns the number of events, which are counted when `kill_at` is 0."""
        status, events = self.run(argv, kill_at)
        assert status == 0, self.output.read_text()
        return events


@contextmanager
def children(output: Path) -> Iterator[Children]:
    command = [sys.executable, "-m", "tests.rl.killed_runs"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        try:
            yield Children(server, output)
        finally:
            server.kill()


def kill_and_resume(forked: Children, case: Case, name: str, moments: list[int]) -> int:
    """Kills a run at each of the moments, then lets it end; returns how many of the kills struck."""
    struck = 0
    for moment in moments:
        resumed = ["--resume"] if (case.run(name) / "config.toml").exists() else []
        status, _ = forked.run([*case.argv(name), *resumed], moment)
        assert status in (0, signal.SIGKILL), forked.output.read_text()
        struck += status == signal.SIGKILL
    forked.finish([*case.argv(name), "--resume"])
    return struck


def draw_moments(events: int, kills: int, seed: int) -> list[int]:
    """So short after one another that the run has not ended before the last of them."""
    draw = random.Random(seed).random
    return [1 + int(1.2 * draw() * events / kills) for _ in range(kills)]


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def final_state(run: Path) -> LoopState:
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    return read_state(newest)


def check_once(run: Path, case: Case) -> int:
    """Every task that was ever drawn was trained once, or dropped once with a reason, or is still to come; or
    it is of a fixed set and was passed over, which befalls only a problem that was played before. Returns how
    many were."""
    state, lines = final_state(run), rows(run, "tasks.jsonl")
    fates = [*chain.from_iterable(line["trained"] for line in lines)]
    fates += [*chain.from_iterable(line["dropped"] for line in lines), *state.dropped]
    fates += [task.key for task in state.pending]
    assert len(fates) == len(set(fates))
    source, passed_over = task_source(load(case.settings, {})), 0
    for family, level, count in state.curriculum["drawer"]["drawn"]:
        numbers = (case.seed * SEEDS_OF_A_RUN + number for number in range(count))
        played = set[str]()
        for task in (source.train(family, level, number) for number in numbers):
            if task.key in fates:
                fates.remove(task.key)
                played.add(task.question)
            else:
                assert source.set_size(family, level), task.key
                assert task.question in played, task.key
                passed_over += 1
    assert fates == []
    return passed_over


def check_curves(run: Path, case: Case) -> None:
    """One row a step, time that only grows, the bound held; nothing half written is left."""
    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, case.steps + 1))
    walls = [row["time/wall"] for row in metrics]
    assert walls == sorted(walls)
    assert max(row["off_policy/max"] for row in metrics) <= case.bound
    assert all(row["loop/lag_max_s"] >= row["loop/lag_p99_s"] >= 0.0 for row in metrics)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["worst"]["loop_lag_max_s"] == max(row["loop/lag_max_s"] for row in metrics)
    assert (summary["length_bias"]["bias"], summary["length_bias"]["late_episodes"]) == (0.0, 0)
    assert summary["length_bias"]["trained_tokens_mean"] > 0
    assert [row["version"] for row in metrics] == sorted({row["version"] for row in metrics})
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"step-{case.steps - 1:06d}", f"step-{case.steps:06d}"]


def check_equal(one: Path, other: Path) -> None:
    """The same tasks in the same steps, the same curriculum and random state at each, the same weights."""
    assert (one / "tasks.jsonl").read_text() == (other / "tasks.jsonl").read_text()
    left, right = (newest_checkpoint(run / "checkpoints") for run in (one, other))
    assert left is not None
    assert right is not None
    for file in (path for path in left.iterdir() if path.name != "state.json"):
        assert file.read_bytes() == (right / file.name).read_bytes(), file.name
    for key in ("train/loss", "solve_rate/all", "rollout/generated_tokens"):
        assert [row.get(key) for row in rows(one, "metrics.jsonl")] == [
            row.get(key) for row in rows(other, "metrics.jsonl")
        ], key


def left_behind(forked: Children, case: Case) -> list[str]:
    """Weights in shared memory, and processes that name the case's directory."""
    found = [
        str(path)
        for path in SHARED_MEMORY.glob(f"{PREFIX}*")
        if int(path.name.removeprefix(PREFIX).partition("-")[0]) in forked.pids
    ]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(case.directory / "runs") in command:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bound", type=int, default=0)
    parser.add_argument("--torch", action="store_true", help="a real trainer, of a tiny model")
    parser.add_argument("--fixed", action="store_true", help="tasks of a fixed set, of which some rest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = None
        if arguments.torch:
            model = build_tiny_model(directory / "tiny", prepare_model(SMOLLM2, ROOT / "models"))
        case = Case(
            directory, arguments.steps, arguments.seed, arguments.bound, model=model, fixed=arguments.fixed
        )
        with children(directory / "output") as forked:
            events = forked.finish(case.argv("whole"), 0)
            moments = draw_moments(events, arguments.kills, arguments.seed)
            struck = kill_and_resume(forked, case, "killed", moments)
            for run in (case.run("whole"), case.run("killed")):
                check_once(run, case)
                check_curves(run, case)
            if not case.bound:
                check_equal(case.run("whole"), case.run("killed"))
            deadline = time.monotonic() + 10
            while (left := left_behind(forked, case)) and time.monotonic() < deadline:
                os.sched_yield()
            assert left == []
        print(f"{struck} kills of {events} events, {case.steps} steps: each task once, nothing left behind")


if __name__ == "__main__":
    main()
