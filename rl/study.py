"""`python -m rl study`: the curriculum against equal shares of all tasks, at equal trained tokens."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl.command_line import add_json
from rl.config import Config, load
from rl.equal_tokens import Curve, Difference, compare, read_curve
from rl.errors import ConfigError, RlError

ARMS = {"filter": (), "uniform": ("--no-filter",)}
"""The arms, and what each adds to the command line of `train`. The first is measured against the second."""


class StudyFailed(RlError):
    """A run of a study did not end well."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of a study, and the arguments of `python -m rl` that make it."""

    directory: Path
    arguments: tuple[str, ...]

    @property
    def done(self) -> bool:
        return (self.directory / "summary.json").is_file()


Train = Callable[[Planned], int]
"""Makes one run, and returns its exit code."""


def train_in_process(planned: Planned) -> int:
    """A process for each run: an engine's memory goes with its process. It reports on standard error."""
    command = [sys.executable, "-m", "rl", *planned.arguments]
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "study",
        help="train with and without the curriculum, and compare at equal trained tokens",
        description="Trains with the curriculum and with equal shares of all tasks, once for each seed, into "
        "RUNS_DIR/NAME of the settings, and compares held-out solve rates at equal trained tokens. Runs that "
        "are there and finished are not made again.",
    )
    parser.add_argument("config", type=Path, help="TOML file of settings; heldout.every_steps must be set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    add_json(parser, "study.json")


def study(arguments: argparse.Namespace, console: Console, train: Train = train_in_process) -> Path:
    """Makes the runs that are missing, prints the comparison and writes it to `study.json`, which it returns.

    Raises ConfigError, and StudyFailed when a run does not end well.
    """
    config = load(arguments.config, {})
    if not config.heldout.every_steps:
        raise ConfigError(f"{arguments.config}: heldout.every_steps = 0: set it, for a study compares curves")
    seeds = list(dict.fromkeys(arguments.seeds))
    runs = plan(config, arguments.config, seeds)
    # Seed by seed, so that what there is after a while can be compared.
    for seed in seeds:
        for arm in ARMS:
            _make(runs[arm, seed], train, console)
    curves = {arm: [read_curve(runs[arm, seed].directory) for seed in seeds] for arm in ARMS}
    tokens, differences = compare(*curves.values())
    for table in (_differences(tokens, seeds, differences), _spent(curves)):
        console.print(table)
    target = config.directory / "study.json"
    content = {
        "seeds": seeds,
        "equal_tokens": tokens,
        "differences": [asdict(each) | {"verdict": each.verdict} for each in differences],
        "curves": {arm: [asdict(curve) for curve in found] for arm, found in curves.items()},
    }
    target.write_text(json.dumps(content, indent=2) + "\n")
    return target


def plan(config: Config, file: Path, seeds: Sequence[int]) -> dict[tuple[str, int], Planned]:
    """Arm and seed → run."""
    return {
        (arm, seed): Planned(
            config.directory / f"{arm}-{seed}",
            (
                *("train", str(file), "--runs-dir", str(config.directory)),
                *("--name", f"{arm}-{seed}", "--seed", str(seed), *extra),
            ),
        )
        for arm, extra in ARMS.items()
        for seed in seeds
    }


def _make(planned: Planned, train: Train, console: Console) -> None:
    if planned.done:
        console.print(f"{planned.directory} is there", markup=False)
        return
    console.print(f"training {planned.directory}", markup=False)
    code = train(planned)
    if code != 0:
        raise StudyFailed(
            f"{planned.directory} ended with exit code {code}; the same command goes on with what is missing"
        )


def _differences(tokens: float, seeds: Sequence[int], differences: Sequence[Difference]) -> Table:
    first, second = ARMS
    table = Table(title=f"Held-out solve rate over the {tokens:,.0f} trained tokens that all runs have")
    pairs = [f"seed {seed}" for seed in seeds]
    for column in ("", first, second, "difference", "95 % interval", *pairs, f"{first} is"):
        table.add_column(column, justify="left" if column in ("", f"{first} is") else "right")
    for each in differences:
        interval = "-" if each.low is None else f"{each.low:+.3f} to {each.high:+.3f}"
        table.add_row(
            each.what,
            f"{each.first:.3f}",
            f"{each.second:.3f}",
            f"{each.mean:+.3f}",
            interval,
            *(f"{pair:+.3f}" for pair in each.pairs),
            each.verdict,
        )
    return table


def _spent(curves: dict[str, list[Curve]]) -> Table:
    table = Table(title="Whole runs, mean over seeds")
    for column in ("", *curves):
        table.add_column(column, justify="left" if not column else "right")
    for name in next(iter(curves.values()))[0].spent:
        means = (sum(curve.spent[name] for curve in found) / len(found) for found in curves.values())
        table.add_row(name, *(f"{mean:,.0f}" if mean >= 100 else f"{mean:.2f}" for mean in means))
    return table
