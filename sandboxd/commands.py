"""The parts of the `sandboxd` command that talk to a daemon, one function each; they return the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from sandboxd import terminal
from sandboxd.client import Client
from sandboxd.config import ConfigError
from sandboxd.types import Exited, ExitReason, PoolState

if TYPE_CHECKING:
    from sandboxd.bench.docker_sdk import Bare
    from sandboxd.bench.result import Result


async def execute(arguments: argparse.Namespace) -> int:
    """`sandboxd exec`: 0 when the command ended with 0; else 1 and one line that says how it ended."""
    if arguments.tty and not (sys.stdin and sys.stdin.isatty()):
        raise ConfigError("exec --tty: standard input is not a terminal; leave out --tty")
    async with (
        Client(arguments.address) as client,
        client.acquire(arguments.pool, timeout=arguments.wait) as box,
    ):
        end = await terminal.run(
            box,
            arguments.argv,
            on_terminal=arguments.tty,
            interactive=arguments.interactive,
            timeout=arguments.timeout,
        )
    if end.reason is ExitReason.EXITED and end.exit_code == 0:
        return 0
    print(f"sandboxd: {_ending(end, arguments)}", file=sys.stderr)
    return 1


def _ending(end: Exited, arguments: argparse.Namespace) -> str:
    match end.reason:
        case ExitReason.EXITED:
            return f"the command ended with exit code {end.exit_code}"
        case ExitReason.SIGNALED:
            return f"the command was killed by signal {end.signal}"
        case ExitReason.TIMED_OUT:
            return f"the command was killed after {arguments.timeout:g} s"
        case ExitReason.NOT_STARTED:
            return f"the command could not be started: {end.detail}"
        case _:
            return f"the command ended as {end.reason}{f': {end.detail}' if end.detail else ''}"


async def list_sandboxes(arguments: argparse.Namespace) -> int:
    """`sandboxd ls`."""
    async with Client(arguments.address) as client:
        sandboxes = [sandbox async for sandbox in client.list_sandboxes(arguments.pool)]
    if arguments.json:
        for sandbox in sandboxes:
            print(json.dumps(dataclasses.asdict(sandbox)))
        return 0
    table = Table("SANDBOX", "POOL", "STATE", "AGE", "LEASE ENDS IN", "LABELS", box=None)
    now = time.time()
    for sandbox in sandboxes:
        left = "" if sandbox.expires is None else f"{sandbox.expires - now:.0f} s"
        labels = " ".join(f"{key}={value}" for key, value in sandbox.labels.items())
        table.add_row(
            sandbox.name, sandbox.pool, sandbox.state, f"{now - sandbox.created:.0f} s", left, labels
        )
    Console().print(table)
    return 0


async def list_pools(arguments: argparse.Namespace) -> int:
    """`sandboxd pool ls`."""
    async with Client(arguments.address) as client:
        pools = await client.list_pools()
    if arguments.json:
        for name, stats in pools.items():
            print(json.dumps({"pool": name, **dataclasses.asdict(stats)}))
        return 0
    table = Table("POOL", "WARM", "STARTING", "ACTIVE", "WAITING", "FAILED STARTS", "START", box=None)
    for name, stats in pools.items():
        start = "" if stats.start_seconds is None else f"{stats.start_seconds * 1e3:.1f} ms"
        counts = (stats.starting, stats.active, stats.waiting, stats.start_failures_total)
        table.add_row(name, f"{stats.warm} of {stats.warm_target}", *map(str, counts), start)
    console = Console()
    console.print(table)
    for name, stats in pools.items():
        if stats.last_failure:
            what = "DEGRADED" if stats.state is PoolState.DEGRADED else "last failed start"
            console.print(f"{name}: {what}: {stats.last_failure}", markup=False)
    return 0


async def set_pool(arguments: argparse.Namespace) -> int:
    """`sandboxd pool set`."""
    if arguments.warm is None and arguments.size_limit is None:
        raise ConfigError("pool set: name what to change: --warm N or --size-limit N")
    async with Client(arguments.address) as client:
        stats = await client.update_pool(arguments.pool, warm=arguments.warm, size_limit=arguments.size_limit)
    print(f"{arguments.pool}: {stats.warm_target} kept warm, at most {stats.size_limit}")
    return 0


async def bench_burst(arguments: argparse.Namespace) -> int:
    """`sandboxd bench burst`: 1 when a sandbox failed or something was left behind."""
    from sandboxd.bench import burst, docker_sdk

    _check_bench(arguments, "count")
    options = burst.Options(
        count=arguments.count,
        backend=arguments.backend,
        image=arguments.image,
        start_limit=arguments.start_limit,
        hold_seconds=arguments.hold,
        warm=arguments.warm,
    )
    return await _measured(arguments, burst.run(options), lambda bare: docker_sdk.burst(bare, options.count))


async def bench_exec(arguments: argparse.Namespace) -> int:
    """`sandboxd bench exec`: 1 when a command failed or something was left behind."""
    from sandboxd.bench import command, docker_sdk

    _check_bench(arguments, "count", "concurrency", "streams", "output_mb")
    options = command.Options(
        count=arguments.count,
        backend=arguments.backend,
        image=arguments.image,
        concurrency=arguments.concurrency,
        streams=arguments.streams,
        output_bytes=arguments.output_mb * command.MEGABYTE,
    )
    return await _measured(
        arguments, command.run(options), lambda bare: docker_sdk.commands(bare, options.count)
    )


async def bench_churn(arguments: argparse.Namespace) -> int:
    """`sandboxd bench churn`: 1 when something failed or was left behind."""
    from sandboxd.bench import churn, docker_sdk

    _check_bench(arguments, "callers", "warm")
    options = churn.Options(
        backend=arguments.backend,
        image=arguments.image,
        callers=arguments.callers,
        warm=arguments.warm,
        seconds=arguments.seconds,
        start_limit=arguments.start_limit,
    )
    return await _measured(
        arguments, churn.run(options), lambda bare: docker_sdk.churn(bare, options.seconds)
    )


async def bench_soak(arguments: argparse.Namespace) -> int:
    """`sandboxd bench soak`: 1 when something grew, failed or was left behind."""
    from sandboxd.bench import soak

    _check_bench(arguments, "cycles", "callers")
    _check_no_baseline(arguments)
    options = soak.Options(
        backend=arguments.backend,
        image=arguments.image,
        cycles=arguments.cycles,
        callers=arguments.callers,
    )
    return await _measured(arguments, soak.run(options))


async def bench_bombs(arguments: argparse.Namespace) -> int:
    """`sandboxd bench bombs`: 1 when a bystander failed, a sandbox was lost or something was left behind."""
    from sandboxd.bench import bombs

    _check_bench(arguments, "count", "bombs")
    if arguments.backend == "fake":
        raise ConfigError("bench bombs --backend fake: its commands are plain processes of this host")
    _check_no_baseline(arguments)
    options = bombs.Options(
        count=arguments.count,
        backend=arguments.backend,
        image=arguments.image,
        bombs=arguments.bombs,
        seconds=arguments.seconds,
    )
    return await _measured(arguments, bombs.run(options))


async def bench_telemetry(arguments: argparse.Namespace) -> int:
    """`sandboxd bench telemetry`: 1 when a command failed or something was left behind."""
    from sandboxd.bench import telemetry

    _check_bench(arguments, "count", "rounds")
    _check_no_baseline(arguments)
    options = telemetry.Options(arguments.backend, arguments.image, arguments.count, arguments.rounds)
    return await _measured(arguments, telemetry.run(options))


async def bench_fork(arguments: argparse.Namespace) -> int:
    """`sandboxd bench fork`: 1 when a fork failed or something was left behind."""
    from sandboxd.bench import fork

    _check_bench(arguments, "count", "megabytes", "rounds")
    _check_no_baseline(arguments)
    options = fork.Options(
        backend=arguments.backend,
        image=arguments.image,
        count=arguments.count,
        megabytes=arguments.megabytes,
        rounds=arguments.rounds,
    )
    return await _measured(arguments, fork.run(options))


async def bench_chaos(arguments: argparse.Namespace) -> int:
    """`sandboxd bench chaos`: 1 when a rollout ended wrongly, the books do not close or something leaked."""
    from sandboxd.bench import chaos

    _check_bench(arguments, "count", "size", "held")
    _check_no_baseline(arguments)
    options = chaos.Options(
        count=arguments.count,
        backend=arguments.backend,
        image=arguments.image,
        seed=arguments.seed,
        kills=arguments.kills,
        held=arguments.held,
        size=arguments.size,
    )
    return await _measured(arguments, chaos.run(options))


async def bench_starts(arguments: argparse.Namespace) -> int:
    """`sandboxd bench starts`: 1 when something was left behind."""
    from sandboxd.bench import starts

    _check_bench(arguments, "count", "rounds")
    _check_no_baseline(arguments)
    options = starts.Options(
        count=arguments.count,
        backend=arguments.backend,
        image=arguments.image,
        limits=arguments.limits,
        rounds=arguments.rounds,
    )
    return await _measured(arguments, starts.run(options))


def _check_bench(arguments: argparse.Namespace, *counts: str) -> None:
    """Raises ConfigError for what cannot be measured."""
    for name in counts:
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if arguments.backend == "docker" and not arguments.image:
        raise ConfigError(f"bench {arguments.shape} --backend docker needs --image NAME")
    if arguments.baseline and not (arguments.image or arguments.baseline_image):
        raise ConfigError(
            "--baseline docker-sdk needs the name of an image that is there: --image NAME, or"
            " --baseline-image NAME where the backend itself uses none"
        )


def _check_no_baseline(arguments: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if arguments.baseline:
        raise ConfigError(f"bench {arguments.shape} --baseline: the bare Docker SDK has no such measurement")


async def _measured(
    arguments: argparse.Namespace,
    measuring: Awaitable[Result],
    baseline: Callable[[Bare], Result] | None = None,
) -> int:
    """Measures, then the baseline where it is asked for, never both at once; shows and writes the result."""
    from sandboxd.bench import docker_sdk, report

    result = await measuring
    if arguments.baseline and baseline is not None:
        image = arguments.baseline_image or arguments.image
        result.baseline = await docker_sdk.measure(image, baseline)
    report.show(result)
    if arguments.json:
        try:
            arguments.json.write_text(json.dumps(result.to_json(), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {arguments.json}: {error.strerror}") from error
    return 0 if result.clean else 1
