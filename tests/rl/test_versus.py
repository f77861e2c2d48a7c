"""Arms are trained once, measured by the same problems, and compared by the time to a solve rate."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from rl.cli import main, parser
from rl.cli import settings as train_settings
from rl.config import Config, load
from rl.errors import ConfigError
from rl.kept_weights import kept_weights, step_directory
from rl.measuring import missing, read_measured, write_measured
from rl.planned import RunFailed
from rl.versus import Outcome, versus
from tests.source_tree import ROOT

REQUIREMENTS = ROOT / "requirements"
SCRIPT = ROOT / "scripts" / "trl.sh"


def asked(arguments: Sequence[str]) -> Config:
    return train_settings(parser().parse_args(arguments))


def write_run(directory: Path, seconds_a_step: float, steps: int = 4) -> None:
    """A finished run that kept the weights of every step."""
    for step in range(1, steps + 1):
        step_directory(directory, step).mkdir(parents=True)
    rows = [{"step": float(step), "time/wall": step * seconds_a_step} for step in range(1, steps + 1)]
    summary = {
        "steps": steps,
        "loop_s": steps * seconds_a_step + 100,
        "trained_tokens": 400,
        "generated_tokens": 1200,
        "wait_ratio": 0.5,
        "generator_idle_ratio": 0.1,
    }
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "summary.json").write_text(json.dumps(summary))


class FakeRun:
    """Trains in no time: 10 s a step with bound 0, 5 s with more. Every step is worth 0.1 when measured."""

    def __init__(self, codes: tuple[int, ...] = ()) -> None:
        self.commands: list[tuple[str, ...]] = []
        self._codes = iter(codes)

    def __call__(self, arguments: Sequence[str]) -> int:
        self.commands.append(tuple(arguments))
        code = next(self._codes, 0)
        if code == 0 and arguments[0] == "train":
            config = asked(arguments)
            write_run(config.directory, 5.0 if config.staleness_bound else 10.0)
            (config.directory / "config.toml").write_text(config.as_toml())
        elif code == 0:
            measuring = parser().parse_args(arguments)
            for run in measuring.run:
                rates = {step: 0.3 + 0.1 * step for step in (0, *kept_weights(run))}
                write_measured(run, measuring.problems, rates)
        return code


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "versus.toml"
    text = f'name = "v"\nruns_dir = "{tmp_path}"\nsteps = 4\n[heldout]\nweights_every_steps = 1\n'
    file.write_text(text)
    return file


def run_versus(settings: Path, run: FakeRun, *options: str) -> list[Outcome]:
    return versus(parser().parse_args(["versus", str(settings), *options]), Console(width=200), run)


def test_arms_and_runs_beside_are_compared_by_the_time_to_the_target(settings: Path, tmp_path: Path) -> None:
    beside, figures = tmp_path / "other", tmp_path / "figures.json"
    write_run(beside, 20.0)
    options = ("--beside", str(beside), "--json", str(figures), "--problems", "7", "--target", "0.55")
    run = FakeRun()
    found = run_versus(settings, run, *options)
    assert [each.arm for each in found] == ["sync", "async", "other"]
    assert [each.seconds_to(0.55) for each in found] == pytest.approx([25.0, 12.5, 50.0])
    assert [command[0] for command in run.commands] == ["train", "train", "measure"]
    bounds = [asked(command).staleness_bound for command in run.commands[:2]]
    assert bounds == [0, 1]
    written = json.loads(figures.read_text())
    assert written["problems"] == 7
    assert [arm["seconds_to_target"] for arm in written["arms"]] == pytest.approx([25.0, 12.5, 50.0])
    assert written["arms"][0]["trained_tokens_per_s"] == pytest.approx(10.0)


def test_what_is_trained_is_not_trained_again(settings: Path) -> None:
    with pytest.raises(RunFailed, match=r"async-0 ended with exit code 3; the same command goes on"):
        run_versus(settings, FakeRun((0, 3)))
    again = FakeRun((0, 4))
    with pytest.raises(RunFailed, match="measuring ended with exit code 4; the same command goes on"):
        run_versus(settings, again)
    assert [command[0] for command in again.commands] == ["train", "measure"]
    assert len(run_versus(settings, FakeRun(), "--arms", "async")) == 1


def test_a_run_of_other_settings_is_refused(settings: Path) -> None:
    run_versus(settings, FakeRun())
    with pytest.raises(ConfigError, match=r"sync-0 was made with steps = 4, and 9 is asked for: move"):
        run_versus(settings, FakeRun(), "--steps", "9")
    assert len(run_versus(settings, FakeRun(), "--steps", "9", "--seed", "2")) == 2


def test_a_run_beside_must_have_had_the_same_problems(settings: Path, tmp_path: Path) -> None:
    beside, run = tmp_path / "other", FakeRun()
    write_run(beside, 20.0)
    made = load(settings, {"name": "other", "steps": 9, "staleness_bound": 4})
    (beside / "config.toml").write_text(made.as_toml())
    assert len(run_versus(settings, run, "--beside", str(beside))) == 3
    (beside / "config.toml").write_text(load(settings, {"samples_per_group": 16}).as_toml())
    with pytest.raises(ConfigError, match=r"other was made with samples_per_group = 16, and 8 is asked for"):
        run_versus(settings, run, "--beside", str(beside))


def outcome(*curve: tuple[float, float]) -> Outcome:
    return Outcome("a", 1, 1.0, 1.0, 1.0, 0.0, 0.0, curve)


def test_the_time_to_a_rate_lies_on_the_lines_between_measurements() -> None:
    assert outcome((0.0, 0.1), (10.0, 0.5), (20.0, 0.4), (30.0, 0.6)).seconds_to(0.5) == 10.0
    assert outcome((0.0, 0.1), (10.0, 0.3), (20.0, 0.2), (30.0, 0.6)).seconds_to(0.4) == 25.0
    assert outcome((0.0, 0.6), (10.0, 0.5)).seconds_to(0.5) == 0.0
    assert outcome((0.0, 0.1), (10.0, 0.3)).seconds_to(0.31) is None


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("steps = 3\n", (), "heldout.weights_every_steps = 0: set it"),
        (
            "[heldout]\nweights_every_steps = 1\n",
            ("--target", "1.5"),
            "--target 1.5: a solve rate lies between",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: tuple[str, ...], says: str
) -> None:
    file = tmp_path / "plain.toml"
    file.write_text(text)
    assert main(["versus", str(file), *options]) == 2
    assert says in capsys.readouterr().err


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    run = tmp_path / "r"
    with pytest.raises(
        ConfigError, match=r"r kept no weights: train it with heldout.weights_every_steps = 1"
    ):
        missing([run], 5)
    write_run(run, 1.0, steps=3)
    write_measured(run, 5, {0: 0.1, 2: 0.2})
    assert [each.step for each in missing([run], 5)] == [1, 3]
    assert [each.step for each in missing([run], 6)] == [1, 2, 3]
    (run / "measured.json").write_text("{")
    with pytest.raises(ConfigError, match="remove it to measure anew"):
        missing([run], 5)


def test_a_rehearsed_run_keeps_its_weights_and_is_measured(tmp_path: Path) -> None:
    """The whole, through the command line, without a model."""
    file = tmp_path / "rehearsal.toml"
    file.write_text(
        f'name = "w"\nruns_dir = "{tmp_path}"\nsteps = 4\nfamilies = ["sums"]\ngroups_per_batch = 2\n'
        "samples_per_group = 4\ncheckpoint_every_steps = 0\nfilter = false\n"
        '[trainer]\nbackend = "fake"\n[generator]\nbackend = "fake"\nweights = "file"\n'
        '[sandboxes]\nbackend = "fake"\nwarm = 2\n'
        "[heldout]\nper_kind = 1\nper_level = 1\nweights_every_steps = 2\n"
    )
    assert main(["train", str(file)]) == 0
    run = tmp_path / "w"
    assert list(kept_weights(run)) == [2, 4]
    assert (step_directory(run, 2) / "config.json").is_file()
    assert main(["measure", str(file), str(run), "--problems", "2"]) == 0
    rates = read_measured(run, 2)
    assert list(rates) == [0, 2, 4]
    assert all(0.0 <= rate <= 1.0 for rate in rates.values())
    measured = (run / "measured.json").read_bytes()
    assert main(["measure", str(file), str(run), "--problems", "2"]) == 0
    assert (run / "measured.json").read_bytes() == measured


def test_what_trl_needs_is_pinned_and_none_of_it_is_the_loops() -> None:
    """Its environment sees the loop's packages: one that both had would hide the loop's."""
    cpu, trl = (
        dict(line.split("==") for line in file.read_text().splitlines() if line and line[0] != "#")
        for file in (REQUIREMENTS / "cpu.lock", REQUIREMENTS / "trl.lock")
    )
    assert "trl" in trl
    assert cpu.keys() & trl.keys() == set()


def test_the_script_wants_settings() -> None:
    done = subprocess.run([SCRIPT, "nowhere.toml"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "trl: give a file of settings, such as configs/one_turn.toml\n"
