"""`python -m rl bench`: how the queue between generator and trainer does, simulated in virtual time."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from rl.bench.arms import ARMS, SEEDS, STREAMS, Arm, Cell, World, cells, worlds
from rl.bench.cell import Outcome
from rl.bench.memory import LONG_TOKENS, Memory, measure_memory
from rl.bench.report import tables
from rl.bench.sweep import BASELINE, sweep
from rl.bench.verdicts import Verdict, verdicts
from rl.command_line import add_json_file, check_target, write_json
from rl.errors import ConfigError

STEPS, QUICK_STEPS = 24, 16
MEMORY_EPISODES = 10_000
QUICK_ARMS = ("sync", "async-1", "async-4", "async-8", "drop-late")


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "bench", help="simulate the queue between generator and trainer, in virtual time"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a few worlds and arms only")
    size.add_argument("--full", action="store_true", help="every combination of rate, tail and sandboxes")
    size.add_argument(
        "--memory", type=int, nargs="?", const=MEMORY_EPISODES, metavar="EPISODES",
        help=f"instead, whether memory stays flat over so many episodes (default {MEMORY_EPISODES}) "
        f"of {LONG_TOKENS} tokens",
    )  # fmt: skip
    parser.add_argument(
        "--arm", action="append", choices=[arm.name for arm in ARMS], help="only this one; may be repeated"
    )
    parser.add_argument("--steps", type=int, help=f"of each run (default {STEPS}, or {QUICK_STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="of all chance; the same gives the same figures")
    parser.add_argument(
        "--streams", type=int, default=STREAMS, help=f"requests that fill the generator (default {STREAMS})"
    )
    parser.add_argument("--processes", type=int, help="runs at once (default: one for each core)")
    add_json_file(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture, as PNG")


def bench(arguments: argparse.Namespace, console: Console) -> bool:
    """Runs it and prints what came of it; returns whether all required results hold. Raises ConfigError."""
    began = time.perf_counter()
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        check_target(option, path)
    if arguments.memory is not None:
        if arguments.memory < 1:
            raise ConfigError(f"--memory = {arguments.memory}: at least one episode must be played")
        memory = measure_memory(arguments.memory, lambda text: console.print(text, markup=False))
        _write(arguments.json, {"memory": memory.as_dict()})
        _print_memory(memory, console)
        return memory.flat
    outcomes = _sweep(arguments, console)
    found = verdicts(outcomes)
    _write(
        arguments.json,
        {
            "outcomes": [each.as_dict() for each in outcomes],
            "verdicts": [asdict(each) for each in found],
            "real_seconds": time.perf_counter() - began,
        },
    )
    if arguments.plot is not None:
        from rl.bench.plot import plot

        plot(outcomes, arguments.plot)
    for table in tables(outcomes):
        console.print(table)
        console.print()
    _print_verdicts(found, console)
    return all(each.holds for each in found)


def _sweep(arguments: argparse.Namespace, console: Console) -> list[Outcome]:
    steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    if steps < 8:
        raise ConfigError(f"--steps = {steps}: at least 8, for the first fill the queue and do not count")
    if arguments.streams < 1:
        raise ConfigError(f"--streams = {arguments.streams}: at least one request must fill the generator")
    every = cells(
        worlds(full=arguments.full, quick=arguments.quick),
        _arms(arguments),
        Cell(ARMS[0], World(), steps, arguments.seed, arguments.streams),
        seeds=1 if arguments.quick else SEEDS,
    )

    def say(done: int, last: Outcome) -> None:
        if done % max(1, len(every) // 20) == 0 or done == len(every):
            text = (
                f"{done} of {len(every)} runs; the last, {last.arm}, took {last.processor_seconds:.1f} s for "
            )
            console.print(f"{text}{last.virtual_seconds:.0f} virtual ones", markup=False)

    return sweep(every, say, arguments.processes)


def _arms(arguments: argparse.Namespace) -> list[Arm]:
    """Those asked for, and always the one that all are compared with."""
    wanted = arguments.arm or (QUICK_ARMS if arguments.quick else [arm.name for arm in ARMS])
    return [arm for arm in ARMS if arm.name in wanted or arm.name == BASELINE]


def _print_verdicts(found: list[Verdict], console: Console) -> None:
    for verdict in found:
        mark = "holds" if verdict.holds else "FAILS"
        console.print(f"{mark}: {verdict.what} ({verdict.measured})", markup=False, soft_wrap=True)


def _print_memory(memory: Memory, console: Console) -> None:
    console.print(
        f"{'flat' if memory.flat else 'NOT FLAT'}: {memory.episodes} episodes of {memory.tokens} tokens, "
        f"{memory.passed_through:.0f} MiB of arrays in all; resident {memory.resident_third:.0f} MiB after "
        f"a third and {memory.resident_end:.0f} MiB at the end; finished groups took "
        f"{memory.queue_peak:.0f} MiB at most",
        markup=False,
        soft_wrap=True,
    )


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, json.dumps(content, indent=2) + "\n")
