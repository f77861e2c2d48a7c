"""The command line of the loop: `python -m rl train [CONFIG]`, `eval --task FAMILY`, `report RUN`, `bench`"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from rl import eval_command, measuring, packing_bench, processes
from rl import versus as versus_command
from rl.bench import command as bench_command
from rl.command_line import Parser, add_examples, add_json, check_runs, prints_json
from rl.comparison import write_comparison
from rl.config import Config, load
from rl.errors import ConfigError, RlError
from rl.generator import GeneratorDead, UpdateFailed
from rl.model import ModelNotFound
from rl.progress import Progress
from rl.report import write_report
from rl.run import run
from rl.start import find_start
from rl.study import add_parser as add_study_parser
from rl.study import study
from rl.tasks import UnknownFamily
from sandboxd import beginning
from sandboxd.beginning import INTERRUPTED
from sandboxd.errors import BackendUnavailable, PoolNotFound, SandboxdError

Result = TypeVar("Result")

OK, FAILED, USAGE = 0, 1, 2

FILE_COLUMNS = 180
"""Of tables that go to a file, where no terminal says how wide it is."""

STOP_SECONDS = 8.0
"""After Ctrl-C everything must have ended within 10 s, whatever library is in the middle of what."""

USER_ERRORS = (ConfigError, ModelNotFound, UnknownFamily, BackendUnavailable, PoolNotFound)
USER_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOENT, errno.EROFS)
RUN_ERRORS = (RlError, GeneratorDead, UpdateFailed, SandboxdError)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(
        prog="python -m rl",
        description="Trains a language model by reinforcement learning on tasks that need a Python tool, "
        "which runs in sandboxes leased from sandboxd.",
        epilog="Exit codes: 0 done, 1 the run failed, 2 wrong usage or settings, 130 interrupted.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a model; results go to runs/NAME")
    train.add_argument("config", nargs="?", type=Path, help="TOML file of settings (default: all defaults)")
    train.add_argument("--name", help="name of the run, and of its directory")
    train.add_argument("--seed", type=int, help="seed of the tasks and the engine")
    train.add_argument("--steps", type=int, help="batches to train")
    train.add_argument("--time-limit", type=float, metavar="SECONDS", help="end the whole run by then")
    train.add_argument("--sync", action="store_true", help="staleness bound 0: generate, then train")
    train.add_argument("--no-filter", action="store_true", help="equal shares of all tasks, none replaced")
    train.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    train.add_argument("--runs-dir", type=Path, help="where runs are kept (default: runs)")
    add_json(train, "summary.json")
    eval_command.add_parser(commands)
    bench_command.add_parser(commands)
    add_study_parser(commands)
    versus_command.add_parser(commands)
    measuring.add_parser(commands)
    packing_bench.add_parser(commands)
    report = commands.add_parser("report", help="write a run's report.html again, or compare several runs")
    report.add_argument("run", type=Path, nargs="+", help="directory of a run; several are put side by side")
    add_json(report, "where it is")
    add_examples(commands)
    return top


def settings(arguments: argparse.Namespace) -> Config:
    """The configuration file with the command line's values over it. Raises ConfigError."""
    return load(
        arguments.config,
        {
            "name": arguments.name,
            "seed": arguments.seed,
            "steps": arguments.steps,
            "time_limit_seconds": arguments.time_limit,
            "staleness_bound": 0 if arguments.sync else None,
            "filter": False if arguments.no_filter else None,
            "runs_dir": arguments.runs_dir,
        },
    )


def train(arguments: argparse.Namespace, began: float) -> int:
    config = settings(arguments)
    start = find_start(config, resume=arguments.resume)
    # Copies of the descriptors: while the engine starts, descriptor 1 is its log's.
    with os.fdopen(os.dup(1), "w") as output, os.fdopen(os.dup(2), "w") as errors:
        console = Console(file=errors if arguments.json else output, highlight=False)
        with Progress(config.steps, console=console) as progress:
            try:
                summary = asyncio.run(interruptible(run(config, start, progress, began), progress))
            except asyncio.CancelledError:
                progress.say(f"interrupted; --resume goes on from {config.directory / 'checkpoints'}")
                return INTERRUPTED
        page = config.directory / "report.html"
        print(json.dumps(summary) if arguments.json else f"report: {page}", file=output)
    return OK


def evaluate(arguments: argparse.Namespace) -> int:
    """What a model solves: `eval`, `measure`."""
    # A copy of the descriptor: while a local engine starts, descriptor 1 is its log's.
    with os.fdopen(os.dup(1), "w") as output, os.fdopen(os.dup(2), "w") as errors:
        progress = Progress(1, console=Console(file=errors, highlight=False))
        try:
            if arguments.command == "measure":
                asyncio.run(interruptible(measuring.measure_kept(arguments, progress), progress))
                found = {str(run): measuring.read_file(run) for run in arguments.run}
                output.write(f"{json.dumps(found)}\n" if arguments.json else "")
                return OK
            table = asyncio.run(interruptible(eval_command.evaluate(arguments, progress), progress))
        except asyncio.CancelledError:
            return INTERRUPTED
        if arguments.json:
            output.write((eval_command.settings(arguments).directory / "eval.json").read_text())
        else:
            Console(file=output, highlight=False).print(table)
    return OK


def measure(arguments: argparse.Namespace) -> int:
    """What prints figures: `bench`, `study`, `versus`, `packing`. SIGTERM ends them as Ctrl-C does."""
    aside = prints_json(arguments)
    shown = sys.stderr if aside else sys.stdout
    console = Console(highlight=False, stderr=aside, width=None if shown.isatty() else FILE_COLUMNS)
    try:
        with processes.terminated_as_interrupted():
            if arguments.command == "bench":
                return OK if bench_command.bench(arguments, console) else FAILED
            if arguments.command == "study":
                figures = study(arguments, console)
                console.print(f"figures: {figures}", markup=False, soft_wrap=True)
            elif arguments.command == "versus":
                versus_command.versus(arguments, console)
            else:
                packing_bench.packing(arguments, console)
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


async def interruptible(work: Coroutine[Any, Any, Result], progress: Progress) -> Result:
    """Runs until done, or until the first SIGINT or SIGTERM cancels it; then nothing lasts over 10 s.

    A library's thread that cannot be cancelled (the engine's start) ends when its processes do.
    """
    this = asyncio.current_task()
    assert this is not None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
        deadline = threading.Timer(STOP_SECONDS, processes.end_at_once, [INTERRUPTED])
        deadline.daemon = True
        deadline.start()
        progress.say("stopping")
        this.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return await work
    finally:
        processes.kill_descendants()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    began = time.monotonic()
    arguments = parser().parse_args(argv)
    try:
        beginning.over()
        if arguments.command == "report":
            runs = arguments.run
            check_runs(runs)
            page = write_report(runs[0]) if len(runs) == 1 else write_comparison(runs)
            print(json.dumps({"report": str(page)}) if arguments.json else page)
            return OK
        if arguments.command in ("bench", "study", "versus", "packing"):
            return measure(arguments)
        if arguments.command in ("eval", "measure"):
            return evaluate(arguments)
        return train(arguments, began)
    except KeyboardInterrupt:
        # While nothing ran yet that says what it was doing.
        return INTERRUPTED
    except USER_ERRORS as error:
        print(f"rl: {_line(error)}", file=sys.stderr)
        return USAGE
    except RUN_ERRORS as error:
        print(f"rl: {type(error).__name__}: {_line(error)}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"rl: {error}", file=sys.stderr)
        return USAGE if error.errno in USER_FAULTS else FAILED


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
