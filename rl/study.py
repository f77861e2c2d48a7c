"""`python -m rl study`: the curriculum against equal shares of all tasks, at equal trained tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl.command_line import add_json_file, check_target, write_json
from rl.config import Config, load
from rl.equal_tokens import Curve, Difference, compare, read_curve
from rl.errors import ConfigError
from rl.planned import Arm, Planned, Train, in_process, make, plan

FILTER_TIME = 0.65
"""Of the time that the arm without the filter gets. With it far fewer groups are silent, so twice as many
tokens are trained in the same time, and what it trains beyond the other arm's tokens is not compared."""

SHORTER = "filter"
ARMS = {SHORTER: Arm(), "uniform": Arm(("--no-filter",), {"filter": False})}
"""The arms. The first is measured against the second."""


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "study",
        help="train with and without the curriculum, and compare at equal trained tokens",
        description="Trains with the curriculum and with equal shares of all tasks, once for each seed, into "
        "RUNS_DIR/NAME of the settings, and compares held-out solve rates at equal trained tokens. Runs that "
        "are there and finished are not made again, so it can be stopped and goes on with the same command.",
    )
    parser.add_argument("config", type=Path, help="TOML file of settings; heldout.every_steps must be set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    add_json_file(parser)


def study(arguments: argparse.Namespace, console: Console, train: Train = in_process) -> Path:
    """Makes the runs that are missing, prints the comparison and writes it to `study.json`, which it returns,
    and to where `--json` says.

    Raises ConfigError, and RunFailed when a run does not end well.
    """
    check_target("--json", arguments.json)
    config = load(arguments.config, {})
    if not config.heldout.every_steps:
        raise ConfigError(f"{arguments.config}: heldout.every_steps = 0: set it, for a study compares curves")
    seeds = list(dict.fromkeys(arguments.seeds))
    runs = plan_all(arguments.config, config, seeds)
    # Seed by seed, so that what there is after a while can be compared.
    for seed in seeds:
        for arm in ARMS:
            make(runs[arm, seed], train, console)
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
    text = json.dumps(content, indent=2) + "\n"
    target.write_text(text)
    if arguments.json is not None:
        write_json(arguments.json, text)
    return target


def plan_all(file: Path, config: Config, seeds: Sequence[int]) -> dict[tuple[str, int], Planned]:
    """Arm and seed → run. Raises ConfigError."""
    limit = config.time_limit_seconds
    times = dict.fromkeys(ARMS, limit) | {SHORTER: None if limit is None else FILTER_TIME * limit}
    return {
        (name, seed): plan(file, f"{name}-{seed}", _within(arm, times[name]), {"seed": seed})
        for name, arm in ARMS.items()
        for seed in seeds
    }


def _within(arm: Arm, seconds: float | None) -> Arm:
    if seconds is None:
        return arm
    limit = {"time_limit_seconds": seconds}
    return Arm((*arm.flags, "--time-limit", str(seconds)), {**arm.settings, **limit})


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
