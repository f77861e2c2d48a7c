"""A study makes the runs that are missing, and compares its arms where all of them have been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl.__main__ import main, parser
from rl.equal_tokens import Curve, compare, difference, read_curve
from rl.errors import ConfigError
from rl.metrics import training_row
from rl.study import ARMS, Planned, StudyFailed, study
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

    def __call__(self, planned: Planned) -> int:
        self.asked.append(planned.arguments)
        code = next(self._codes, 0)
        if code == 0:
            filtered = "--no-filter" not in planned.arguments
            seed = int(planned.arguments[planned.arguments.index("--seed") + 1])
            gain = (0.2 if filtered else 0.1) + 0.001 * seed
            write_run(planned.directory, gain, 200 if filtered else 100)
        return code


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
        asked = parser().parse_args(arguments)
        assert asked.config == settings
        assert asked.runs_dir / asked.name == tmp_path / "s" / asked.name
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


def test_what_is_finished_is_not_trained_again(settings: Path, tmp_path: Path) -> None:
    arguments = parser().parse_args(["study", str(settings), "--seeds", "4", "5"])
    broken = FakeTrain((0, 0, 1))
    with pytest.raises(StudyFailed, match=r"filter-5 ended with exit code 1"):
        study(arguments, Console(), broken)
    train = FakeTrain()
    study(arguments, Console(), train)
    names = [parser().parse_args(asked).name for asked in train.asked]
    assert names == ["filter-5", "uniform-5"]
    once_more = FakeTrain()
    study(arguments, Console(), once_more)
    assert once_more.asked == []


def test_the_arms_differ_in_the_filter_alone(settings: Path) -> None:
    train = FakeTrain()
    study(parser().parse_args(["study", str(settings), "--seeds", "1"]), Console(), train)
    filtered, uniform = (parser().parse_args(asked) for asked in train.asked)
    assert (filtered.no_filter, uniform.no_filter) == (False, True)
    assert list(ARMS) == ["filter", "uniform"]
    assert filtered.seed == uniform.seed == 1


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
