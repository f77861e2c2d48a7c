"""A study makes the runs that are missing, and compares its arms where all of them have been."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl.cli import main, parser
from rl.cli import settings as train_settings
from rl.config import Config
from rl.equal_tokens import Curve, compare, difference, read_curve
from rl.errors import ConfigError
from rl.metrics import training_row
from rl.planned import RunFailed
from rl.study import ARMS, FILTER_TIME, study
from rl.types import StepReport


def write_run(directory: Path, gain: float, tokens_a_step: int, steps: int = 8) -> None:
    """A finished run that rises by `gain` a thousand trained tokens from 0.1, measured every second step."""
    directory.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        report = StepReport(step, 0.0, 0.0, tokens_a_step, tokens_a_step, 900, 1.0, 0.0, 0.0, 1.0)
        row: dict[str, Any] = {"step": step, "groups/ready": 3.0, "groups/zero_advantage": 1.0}
        row |= training_row(report)
        if step % 2 == 0:
            row["heldout/overall"] = 0.1 + gain * step * tokens_a_step / 1000
        rows.append(row)
    total = steps * tokens_a_step
    summary = {
        "heldout": {"before": {"overall": 0.1}, "after": {"overall": 0.1 + gain * total / 1000}},
        "trained_tokens": total,
        "generated_tokens": 3 * total,
        "steps": steps,
        "loop_s": 60.0,
    }
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "summary.json").write_text(json.dumps(summary))


class FakeTrain:
    """Writes runs in which the filter learns faster a token; `codes` are the exit codes, in order."""

    def __init__(self, codes: tuple[int, ...] = ()) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._codes = iter(codes)

    def __call__(self, arguments: Sequence[str]) -> int:
        self.asked.append(tuple(arguments))
        code = next(self._codes, 0)
        if code == 0:
            config = asked(arguments)
            gain = (0.2 if config.filter else 0.1) + 0.001 * config.seed
            write_run(config.directory, gain, 200 if config.filter else 100)
            (config.directory / "config.toml").write_text(config.as_toml())
        return code


def asked(arguments: Sequence[str]) -> Config:
    """What a run of these arguments is made with."""
    return train_settings(parser().parse_args(arguments))


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "study.toml"
    file.write_text(f'name = "s"\nruns_dir = "{tmp_path}"\n[heldout]\nevery_steps = 2\n')
    return file


def test_a_study_compares_at_equal_tokens(settings: Path, tmp_path: Path) -> None:
    train, console = FakeTrain(), Console(width=250, record=True)
    target = study(parser().parse_args(["study", str(settings)]), console, train)
    assert len(train.asked) == 2 * 3
    for arguments in train.asked:
        assert parser().parse_args(arguments).config == settings
        assert asked(arguments).directory == tmp_path / "s" / asked(arguments).name
    found = json.loads(target.read_text())
    assert found["equal_tokens"] == 800
    last = found["differences"][3]
    assert last["what"] == "after 100% of them"
    assert last["first"] == pytest.approx(0.1 + 0.8 * 0.202)
    assert last["second"] == pytest.approx(0.1 + 0.8 * 0.102)
    assert last["pairs"] == pytest.approx([0.08] * 3)
    assert last["verdict"] == "better"
    shown = console.export_text()
    assert "filter is" in shown
    assert "groups without a signal" in shown


def test_figures_go_where_they_are_asked_for_too(
    settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = tmp_path / "figures.json"
    asked_for = ["study", str(settings), "--seeds", "4"]
    target = study(parser().parse_args([*asked_for, "--json", str(wanted)]), Console(), FakeTrain())
    assert wanted.read_text() == target.read_text()
    capsys.readouterr()
    assert main([*asked_for, "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == target.read_text()
    assert "figures: " in err


def test_what_is_finished_is_not_trained_again(settings: Path, tmp_path: Path) -> None:
    command = parser().parse_args(["study", str(settings), "--seeds", "4", "5"])
    broken = FakeTrain((0, 0, 1))
    with pytest.raises(RunFailed, match=r"filter-5 ended with exit code 1"):
        study(command, Console(), broken)
    train = FakeTrain()
    study(command, Console(), train)
    names = [asked(arguments).name for arguments in train.asked]
    assert names == ["filter-5", "uniform-5"]
    once_more = FakeTrain()
    study(command, Console(), once_more)
    assert once_more.asked == []


def test_a_run_of_other_settings_is_not_taken_for_this_one(settings: Path, tmp_path: Path) -> None:
    command = parser().parse_args(["study", str(settings), "--seeds", "4"])
    study(command, Console(), FakeTrain())
    settings.write_text(f"steps = 7\n{settings.read_text()}")
    train = FakeTrain()
    with pytest.raises(ConfigError, match=r"filter-4 was made with steps = 30, and 7 is asked for: move"):
        study(command, Console(), train)
    assert train.asked == []


def test_an_arm_that_trains_more_in_an_hour_gets_less_time(settings: Path) -> None:
    settings.write_text(f"time_limit_seconds = 100\n{settings.read_text()}")
    train = FakeTrain()
    study(parser().parse_args(["study", str(settings), "--seeds", "1"]), Console(), train)
    limits = {run.name: run.time_limit_seconds for run in map(asked, train.asked)}
    assert limits == {"filter-1": 100 * FILTER_TIME, "uniform-1": 100}


def test_the_arms_differ_in_the_filter_alone(settings: Path) -> None:
    train = FakeTrain()
    study(parser().parse_args(["study", str(settings), "--seeds", "1"]), Console(), train)
    filtered, uniform = (asked(arguments).model_dump() for arguments in train.asked)
    differ = {key: (value, uniform[key]) for key, value in filtered.items() if value != uniform[key]}
    assert differ == {"filter": (True, False), "name": ("filter-1", "uniform-1")}
    assert list(ARMS) == ["filter", "uniform"]
    assert uniform["seed"] == 1


def test_a_study_without_measurements_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plain.toml"
    file.write_text("steps = 3\n")
    assert main(["study", str(file)]) == 2
    assert "heldout.every_steps = 0: set it" in capsys.readouterr().err


def test_a_run_that_was_not_measured_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "r", 0.1, 100, steps=1)
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    summary["heldout"]["after"]["overall"] = None
    (tmp_path / "r" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match="fewer than two points"):
        read_curve(tmp_path / "r")
    with pytest.raises(ConfigError, match="holds no finished run"):
        read_curve(tmp_path / "none")


def test_curves_are_read_between_measurements() -> None:
    curve = Curve((0.0, 100.0, 300.0), (0.0, 0.5, 0.7), {})
    assert [curve.at(tokens) for tokens in (0, 50, 100, 200, 300)] == pytest.approx([0, 0.25, 0.5, 0.6, 0.7])
    assert curve.mean_until(100) == pytest.approx(0.25)
    assert curve.mean_until(300) == pytest.approx((0.25 * 100 + 0.6 * 200) / 300)


def test_measurements_of_the_same_weights_are_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "r", 0.1, 100)
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    summary["heldout"]["after"]["overall"] = 0.2
    (tmp_path / "r" / "summary.json").write_text(json.dumps(summary))
    curve = read_curve(tmp_path / "r")
    assert curve.tokens == (0.0, 200.0, 400.0, 600.0, 800.0)
    assert curve.rates[-1] == pytest.approx((0.18 + 0.2) / 2)


def test_verdicts() -> None:
    assert difference("d", [0.5, 0.6, 0.55], [0.3, 0.4, 0.36]).verdict == "better"
    assert difference("d", [0.3, 0.4, 0.36], [0.5, 0.6, 0.55]).verdict == "worse"
    spread = difference("d", [0.5, 0.3, 0.4], [0.3, 0.4, 0.5])
    assert spread.verdict == "no difference shown"
    # Pairs 0.2, -0.1, -0.1: deviation 0.1732, and t of two degrees of freedom is 4.303.
    assert spread.high == pytest.approx(4.303 * 0.17320508 / 3**0.5)
    alone = difference("d", [0.5], [0.3])
    assert (alone.low, alone.verdict) == (None, "one seed alone tells nothing")


def test_the_shortest_run_says_where_arms_are_compared() -> None:
    long, short = Curve((0.0, 1000.0), (0.0, 1.0), {}), Curve((0.0, 400.0), (0.0, 0.2), {})
    tokens, found = compare([long], [short])
    assert tokens == 400
    assert found[3].first == pytest.approx(0.4)
    assert found[3].second == pytest.approx(0.2)
