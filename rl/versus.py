"""`python -m rl versus`: synchronous against asynchronous, and other trainers' runs beside them, by the time
that each takes to the same held-out solve rate."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl.command_line import add_json_file, check_runs, check_target, write_json
from rl.config import SETTINGS_FILE, load
from rl.errors import ConfigError
from rl.measuring import PROBLEMS, read_measured
from rl.planned import Arm, RunFailed, Train, check_same, in_process, make, plan

ARMS = {"sync": Arm(("--sync",), {"staleness_bound": 0}), "async": Arm()}
"""The arms: staleness bound 0, and the settings' own."""

TARGET = 0.55

COMMON = (
    "model",
    "families",
    "seed",
    "groups_per_batch",
    "samples_per_group",
    "precision",
    "episode",
    "trainer.learning_rate",
)
"""Settings and sections that another trainer's run must have in common with the loop's."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `seconds` are of training, not of starts and measurements; `curve` has pairs of such seconds
    and the held-out solve rate in [0, 1] of the weights at that moment. Ratios lie in [0, 1]."""

    arm: str
    steps: int
    seconds: float
    trained_tokens: float
    generated_tokens: float
    wait_ratio: float
    generator_idle_ratio: float
    curve: tuple[tuple[float, float], ...]

    def seconds_to(self, target: float) -> float | None:
        """When the solve rate first reached `target`, on the straight lines between measurements; None when
        it never did."""
        if self.curve[0][1] >= target:
            return self.curve[0][0]
        for (early, low), (late, high) in pairwise(self.curve):
            if low < target <= high:
                return early + (late - early) * (target - low) / (high - low)
        return None

    def as_dict(self, target: float) -> dict[str, Any]:
        """The row of `--json`."""
        return asdict(self) | {
            "steps_per_s": self.steps / self.seconds,
            "trained_tokens_per_s": self.trained_tokens / self.seconds,
            "seconds_to_target": self.seconds_to(target),
        }


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "versus",
        help="compare synchronous and asynchronous training by the time to a held-out solve rate",
        description="Trains the same settings with staleness bound 0 and with their own bound, one after the "
        "other, to the same number of steps, then measures the weights that the runs kept on the same "
        "held-out problems. Runs that are there and finished are not made again.",
    )
    parser.add_argument(
        "config", type=Path, help="TOML file of settings; heldout.weights_every_steps must be set"
    )
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), help="default: all")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="RUN", help="other trainers' runs"
    )
    parser.add_argument("--seed", type=int, help="instead of the settings'")
    parser.add_argument("--steps", type=int, help="instead of the settings'")
    parser.add_argument(
        "--target", type=float, default=TARGET, help=f"solve rate in [0, 1] (default {TARGET})"
    )
    parser.add_argument(
        "--problems", type=int, default=PROBLEMS, help=f"of each family and level (default {PROBLEMS})"
    )
    add_json_file(parser)


def versus(arguments: argparse.Namespace, console: Console, run: Train = in_process) -> list[Outcome]:
    """Makes the runs that are missing, measures them, prints a table, and writes the figures where asked.

    `run` runs `python -m rl` with the given arguments. Raises ConfigError, RunFailed.
    """
    if not 0 < arguments.target <= 1:
        raise ConfigError(f"--target {arguments.target}: a solve rate lies between 0 and 1, such as {TARGET}")
    check_target("--json", arguments.json)
    check_runs(arguments.beside)
    config = load(arguments.config, {"seed": arguments.seed, "steps": arguments.steps})
    if not config.heldout.weights_every_steps:
        raise ConfigError(
            f"{arguments.config}: heldout.weights_every_steps = 0: set it, for what is kept is measured"
        )
    common = {"seed": config.seed, "steps": config.steps}
    planned = {
        arm: plan(arguments.config, f"{arm}-{config.seed}", ARMS[arm], common)
        for arm in dict.fromkeys(arguments.arms)
    }
    for beside in arguments.beside:
        if (beside / SETTINGS_FILE).is_file():
            check_same(beside, config, COMMON)
    for each in planned.values():
        make(each, run, console)
    directories = {arm: each.directory for arm, each in planned.items()}
    directories |= {beside.name: beside for beside in arguments.beside}
    _measure(arguments, directories, run)
    found = [read_outcome(arm, path, arguments.problems) for arm, path in directories.items()]
    console.print(_table(found, arguments))
    if arguments.json is not None:
        content = {
            "target": arguments.target,
            "problems": arguments.problems,
            "seed": config.seed,
            "arms": [each.as_dict(arguments.target) for each in found],
        }
        write_json(arguments.json, json.dumps(content, indent=2) + "\n")
    return found


def _measure(arguments: argparse.Namespace, directories: Mapping[str, Path], run: Train) -> None:
    problems = ("--problems", str(arguments.problems))
    code = run(("measure", str(arguments.config), *map(str, directories.values()), *problems))
    if code != 0:
        raise RunFailed(
            f"measuring ended with exit code {code}; the same command goes on with what is missing"
        )


def read_outcome(arm: str, run: Path, problems: int) -> Outcome:
    """A finished and measured run. Raises ConfigError when a part of it is missing."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        walls = {int(row["step"]): float(row["time/wall"]) for row in rows} | {0: 0.0}
        rates = read_measured(run, problems)
        curve = tuple((walls[step], rate) for step, rate in sorted(rates.items()))
        figures = {
            name: float(summary[name])
            for name in ("trained_tokens", "generated_tokens", "wait_ratio", "generator_idle_ratio")
        }
        # Not the summary's seconds: those hold the last checkpoint, too.
        steps, seconds = int(summary["steps"]), max(walls.values())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{run} holds no finished run that was measured: {error!r}") from error
    if not curve:
        raise ConfigError(f"{run} was not measured with {problems} problems of each level")
    return Outcome(arm, steps, seconds, curve=curve, **figures)


def _table(found: Sequence[Outcome], arguments: argparse.Namespace) -> Table:
    target = arguments.target
    table = Table(title=f"{arguments.problems} held-out problems of each level")
    for column in ("", *(each.arm for each in found)):
        table.add_column(column, justify="left" if not column else "right")
    rows = {
        f"seconds to {target:g}": lambda each: _or_dash(each.seconds_to(target)),
        "seconds": lambda each: f"{each.seconds:.0f}",
        "steps": lambda each: str(each.steps),
        "steps a minute": lambda each: f"{60 * each.steps / each.seconds:.2f}",
        "trained tokens": lambda each: f"{each.trained_tokens:,.0f}",
        "trained tokens/s": lambda each: f"{each.trained_tokens / each.seconds:.1f}",
        "generated tokens": lambda each: f"{each.generated_tokens:,.0f}",
        "wait ratio": lambda each: f"{each.wait_ratio:.2f}",
        "generator idle": lambda each: f"{each.generator_idle_ratio:.2f}",
        "solve rate before, after": lambda each: f"{each.curve[0][1]:.2f}, {each.curve[-1][1]:.2f}",
    }
    for name, tell in rows.items():
        table.add_row(name, *map(tell, found))
    return table


def _or_dash(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.0f}"
