"""`python -m rl measure`: the kept weights of finished runs, all on the same held-out problems.

What several runs have learned is then told by one measurement with one engine, whoever trained them, and none
of their time is spent on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.byte_tokenizer import ByteTokenizer
from rl.command_line import add_json, check_runs
from rl.config import Config, load
from rl.dialogue import Dialogue, Tokenizer
from rl.errors import ConfigError
from rl.evaluation import Evaluation, evaluate
from rl.generator import Generator
from rl.generators.opening import engine_settings
from rl.generators.vllm import open_vllm
from rl.kept_weights import kept_weights
from rl.ledger import Ledger, MeteredGenerator
from rl.model import ChatTokenizer, prepare_model
from rl.player import Player
from rl.precision import resolve
from rl.progress import Progress
from rl.rehearsal import fake_generator
from rl.rollout import Rollout
from rl.run import task_source
from rl.sandboxes import DaemonSandboxes, own_daemon
from rl.session import episode_limits
from rl.tasks import TaskSource, build_held_out
from rl.types import Task
from sandboxd import Client

FILE = "measured.json"
"""In a run's directory: `problems`, how many of each level, and `steps`, step → solve rate in [0, 1]."""

PROBLEMS = 24
BASE = 0
"""The step before the first one: the model that all runs began with."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A measurement that is missing: of a `run`'s weights of a `step`, which lie in `weights`."""

    run: Path
    step: int
    weights: Path


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "measure",
        help="measure the kept weights of runs on the same held-out problems",
        description="Measures what runs had learned after each step whose weights they kept "
        "(heldout.weights_every_steps), and the model that they began with, by one attempt at each of the "
        f"same held-out problems. Solve rates go to {FILE} of each run; what is measured already is left.",
    )
    parser.add_argument("config", type=Path, help="TOML file of settings, as for train")
    parser.add_argument("run", type=Path, nargs="+", help="directory of a run")
    parser.add_argument(
        "--problems", type=int, default=PROBLEMS, help=f"of each family and level (default {PROBLEMS})"
    )
    add_json(parser, f"{FILE} of each run, by directory")


def read_measured(run: Path, problems: int) -> dict[int, float]:
    """Step → solve rate, of a measurement with so many problems of each level; empty when there is none.

    Raises ConfigError when the file cannot be read.
    """
    try:
        content = read_file(run)
        rates = {int(step): float(rate) for step, rate in content["steps"].items()}
        return rates if content["problems"] == problems else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run / FILE} cannot be read: {error!r}; remove it to measure anew") from error


def read_file(run: Path) -> Any:
    """What `measured.json` of a run holds. Raises OSError, ValueError."""
    return json.loads((run / FILE).read_text())


def write_measured(run: Path, problems: int, rates: dict[int, float]) -> None:
    """Replaces the file."""
    content = {"problems": problems, "steps": {str(step): rate for step, rate in sorted(rates.items())}}
    (run / FILE).write_text(json.dumps(content, indent=1) + "\n")


def missing(runs: Sequence[Path], problems: int) -> list[Wanted]:
    """What is to be measured. Raises ConfigError when a run kept no weights."""
    found = []
    for run in runs:
        kept = kept_weights(run)
        if not kept:
            raise ConfigError(f"{run} kept no weights: train it with heldout.weights_every_steps = 1")
        known = read_measured(run, problems)
        found += [Wanted(run, step, path) for step, path in kept.items() if step not in known]
    return found


async def measure_kept(arguments: argparse.Namespace, progress: Progress) -> None:
    """Measures what is missing. Raises ConfigError."""
    if arguments.problems < 1:
        raise ConfigError(f"--problems {arguments.problems}: at least one must be tried")
    check_runs(arguments.run)
    config = load(arguments.config, {})
    wanted = missing(arguments.run, arguments.problems)
    bases = [run for run in arguments.run if BASE not in read_measured(run, arguments.problems)]
    if not wanted and not bases:
        progress.say("everything is measured already")
        return
    source = task_source(config)
    mix = build_held_out(source, per_kind=1, per_level=arguments.problems).mix
    async with _measurer(config, source, mix, progress) as measurer:
        if bases:
            rate = await measurer.rate("the model before training")
            for run in bases:
                _note(run, arguments.problems, BASE, rate)
        for version, each in enumerate(wanted, start=1):
            await measurer.generator.update_weights(each.weights.resolve(), version)
            rate = await measurer.rate(f"{each.run.name} after step {each.step}")
            _note(each.run, arguments.problems, each.step, rate)


def _note(run: Path, problems: int, step: int, rate: float) -> None:
    # At once, so that a measurement that is broken off goes on where it was.
    write_measured(run, problems, read_measured(run, problems) | {step: rate})


@dataclass(frozen=True, slots=True)
class Measurer:
    """Plays one attempt at each problem under whatever weights are live."""

    generator: Generator
    player: Player
    mix: tuple[Task, ...]
    progress: Progress

    async def rate(self, what: str) -> float:
        """Mean reward over the problems that have a verdict. Raises ConfigError when none has."""
        result: Evaluation = await evaluate(self.player, {}, self.mix)
        families = ", ".join(f"{name} {rate:.0%}" for name, rate in result.families.items())
        self.progress.say(f"{what}: {result.describe()} ({families})")
        if result.overall is None:
            raise ConfigError(
                f"{what}: none of {result.attempts} attempts has a verdict; see the daemon's log"
            )
        return result.overall


@asynccontextmanager
async def _measurer(
    config: Config, source: TaskSource, mix: tuple[Task, ...], progress: Progress
) -> AsyncIterator[Measurer]:
    directory = config.directory / "measuring"
    logs = directory.resolve() / "logs"
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    wanted = config.sandboxes
    async with AsyncExitStack() as stack:
        address = wanted.address or await stack.enter_async_context(own_daemon(wanted, directory))
        client = await stack.enter_async_context(Client(address))
        progress.say("starting the generator")
        generator, tokenizer = await _generator(config, logs, stack)
        ledger = Ledger()
        rollout = Rollout(
            MeteredGenerator(generator, ledger),
            DaemonSandboxes.of(client, wanted),
            Dialogue(tokenizer),
            source,
            limits=episode_limits(config.episode),
        )
        seconds = config.episode.seconds
        player = Player(rollout, ledger, concurrent=config.concurrent_episodes, episode_seconds=seconds)
        yield Measurer(generator, player, mix, progress)
        ledger.check()


async def _generator(config: Config, logs: Path, stack: AsyncExitStack) -> tuple[Generator, Tokenizer]:
    if config.generator.backend == "fake":
        return fake_generator(ByteTokenizer(), config.seed), ByteTokenizer()
    path = await asyncio.to_thread(prepare_model, config.model, config.models_dir)
    engine = engine_settings(config, path, logs / "vllm.log", resolve(config.precision))
    return await stack.enter_async_context(open_vllm(engine)), ChatTokenizer(path)
