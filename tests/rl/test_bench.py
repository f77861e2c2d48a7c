"""The bench: the real loop between a simulated generator and trainer, judged as the sweep judges it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rl.bench.arms import ARMS, RATES, SANDBOXES, TAILS, Cell, World, cells, worlds
from rl.bench.cell import Outcome, run_cell
from rl.bench.command import bench
from rl.bench.memory import measure_memory
from rl.bench.plant import Episode, plant
from rl.bench.plot import plot
from rl.bench.report import tables
from rl.bench.sweep import compared, merged
from rl.bench.verdicts import verdicts
from rl.bench.virtual import run_virtual
from rl.cli import main, parser
from rl.processes import descendants
from sandboxd.scratch import scratch_directory

STEPS = 8
CHOSEN = ("sync", "async-1", "async-4", "drop-late")
BY_NAME = {arm.name: arm for arm in ARMS}


def cell(arm: str, world: World = World(tail="constant"), steps: int = STEPS) -> Cell:  # noqa: B008
    return Cell(BY_NAME[arm], world, steps)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Arms in the world with the longest tail, and one in that of failing sandboxes."""
    made = [run_cell(cell(name, World())) for name in CHOSEN]
    return compared([*made, run_cell(cell("async-4", World(sandboxes="5 s, 2% failing")))])


def test_what_is_decided_by_a_ratio_is_run_more_often() -> None:
    equal = [World(1.0), World(1.0, sandboxes="5 s"), World(2.0)]
    runs = Counter((each.arm.name, each.world) for each in cells(equal, ARMS, Cell(ARMS[0], equal[0]), 3))
    assert (
        [runs["async-1", world] for world in equal] == [runs["sync", world] for world in equal] == [12, 3, 1]
    )
    assert [runs["async-2", world] for world in equal] == [3, 3, 1]


def test_arms_keep_its_bound_and_closes_its_books(outcomes: list[Outcome]) -> None:
    assert [each.arm for each in outcomes if not each.ledger_closed] == []
    assert [each.arm for each in outcomes if each.staleness_max > each.bound] == []
    assert {each.steps for each in outcomes} == {STEPS}
    assert outcomes[-1].start_failures >= 0


def test_asynchrony_is_faster_and_only_those_who_give_up_are_biased(outcomes: list[Outcome]) -> None:
    found = {each.arm: each for each in outcomes[:-1]}
    assert found["sync"].speedup == 1.0
    assert found["sync"].wait_ratio > found["async-1"].wait_ratio > found["async-4"].wait_ratio
    assert found["async-4"].speedup > found["async-1"].speedup > 1.2
    for name in ("sync", "async-1", "async-4"):
        assert found[name].late_share == 0.0
        # Long ones are trained on as often as they are begun, but for those still under way at the end.
        assert abs(found[name].length_bias) < 0.04
    assert found["drop-late"].late_share > 0.0
    assert found["drop-late"].length_bias < -0.05


def test_the_same_seed_gives_the_same_figures(outcomes: list[Outcome]) -> None:
    again = compared([run_cell(cell("drop-late", World()))])[0]
    first = next(each for each in outcomes if each.arm == "drop-late")

    def timeless(outcome: Outcome) -> Outcome:
        return replace(outcome, processor_seconds=0.0, speedup=0.0, speedup_tokens=0.0)

    assert timeless(again) == timeless(first)


def test_equal_rates_without_a_tail_are_matched_by_one_step_of_staleness() -> None:
    """Generation and training take as long: side by side twice as fast, but for the last of the requests that
    fill the engine in turns, for pauses of updates, and for groups without a signal."""
    one, other = run_cell(cell("sync")), run_cell(cell("async-1"))
    assert 20.0 < one.step_seconds < 25.0
    assert one.step_seconds / other.step_seconds > 1.6


def test_an_episode_that_never_returns_holds_no_step_beyond_its_limit() -> None:
    """One episode in 29 hangs for its 60 seconds, and no step takes longer than that beside its own work."""

    async def body() -> None:
        async with plant(cell("async-1", steps=6), Episode(seconds=60.0, hang_every=29)) as built:
            await built.loop.run()
            assert built.loop.step == 6
            assert max(row["time/step"] for row in built.rows) < 60.0 + 25.0
            assert built.ledger.episodes.reasons["cancelled:timeout"] > 0
            built.ledger.check()

    run_virtual(body())


def test_memory_stays_flat_while_long_episodes_pass() -> None:
    memory = measure_memory(4 * 64, lambda text: None)
    assert memory.flat, memory
    assert memory.episodes >= 4 * 64
    assert memory.passed_through > 60
    assert 10 < memory.queue_peak < 2 * 64 * 32_000 * 8 / 2**20 * 1.1


def test_the_sweep_covers_what_it_says() -> None:
    whole = worlds(full=True, quick=False)
    assert len(whole) == len(set(whole)) == len(RATES) * len(TAILS) * len(SANDBOXES)
    assert set(worlds(full=False, quick=False)) <= set(whole)
    assert set(worlds(full=False, quick=True)) <= set(whole)


def test_runs_that_differ_in_the_seed_are_put_together(outcomes: list[Outcome]) -> None:
    first = outcomes[0]
    second = replace(first, step_seconds=first.step_seconds + 2.0, ledger_closed=False, discarded={"x": 3})
    (both,) = merged([first, second])
    assert (both.runs, both.steps, both.ledger_closed) == (2, 2 * STEPS, False)
    assert both.step_seconds == pytest.approx(first.step_seconds + 1.0)
    assert both.discarded["x"] == 3


def test_verdicts_say_what_was_measured(outcomes: list[Outcome]) -> None:
    found = {each.what.split(":")[0]: each for each in verdicts(outcomes)}
    assert found["all books close"].holds
    assert "times" in found["async-1 at equal rates, lognormal 1.0"].measured
    broken = [replace(each, ledger_closed=False, staleness_max=99.0) for each in outcomes]
    assert [each.holds for each in verdicts(broken)][-2:] == [False, False]


def test_the_picture_and_the_tables_show_every_arm(outcomes: list[Outcome], tmp_path: Path) -> None:
    plot(outcomes, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=200)
    for table in tables(outcomes):
        console.print(table)
    text = console.export_text()
    assert all(name in text for name in CHOSEN)
    assert "sandboxes 5 s, 2% failing" in text


def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ["bench", "--quick", "--arm", "sync", "--steps", "8", "--json", str(file)]
    console = Console(record=True, width=200)
    worked = bench(parser().parse_args(arguments), console)
    written = json.loads(file.read_text())
    assert worked == all(each["holds"] for each in written["verdicts"])
    assert {each["arm"] for each in written["outcomes"]} == {"sync"}
    assert "books" in console.export_text()


@pytest.mark.parametrize("wrong", [["--steps", "3"], ["--memory", "0"], ["--streams", "0"]])
def test_what_makes_no_sense_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_what_is_ended_leaves_no_process_and_no_files(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "rl", "bench", "--steps", "200", "--processes", "1", "--full"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as program:
        (shared,) = asyncio.run(until(lambda: list(tmp_path.glob("rl-bench-*"))))
        asyncio.run(until(lambda: list(shared.glob("rl-bench-*"))))
        below = [os.pidfd_open(pid) for pid in descendants(program.pid)]
        program.send_signal(number)
        assert program.wait(60) == code
    for process in below:
        assert select.select([process], [], [], 60)[0]
        os.close(process)
    if number == signal.SIGKILL:
        # The next that makes such takes it away, once it is not young.
        os.utime(shared, (0, 0))
        with scratch_directory("rl-bench-", tmp_path) as next_one:
            assert list(tmp_path.iterdir()) == [next_one]
    assert list(tmp_path.iterdir()) == []


async def until(found: Callable[[], list[Path]]) -> list[Path]:
    """What is found, once there is some."""
    async with asyncio.timeout(60):
        while not (paths := found()):
            await asyncio.sleep(0.01)
    return paths
