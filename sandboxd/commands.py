"""The parts of the `sandboxd` command that talk to a daemon, one function each; they return the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from rich.table import Table

from sandboxd import terminal
from sandboxd.client import Box, Client
from sandboxd.config import ConfigError
from sandboxd.output import console, say
from sandboxd.replies import ExecResult
from sandboxd.types import Exited, ExitReason, PoolState
from sandboxd.wire import RUN_OUTPUT_LIMIT_BYTES

OUTPUT_TAIL_BYTES = 256 << 10
"""Of each stream, kept by `exec --json` where a command prints more than one message holds."""


async def execute(arguments: argparse.Namespace) -> int:
    """`sandboxd exec`: 0 when the command ended with 0; else 1 and one line that says how it ended, with
    --json an object in both cases.
    """
    if arguments.json and (arguments.tty or arguments.interactive):
        raise ConfigError("exec --json: goes without --interactive and --tty, which pass on what is printed")
    if arguments.tty and not (sys.stdin and sys.stdin.isatty()):
        raise ConfigError("exec --tty: standard input is not a terminal; leave out --tty")
    if not arguments.wait >= 0:
        raise ConfigError(f"exec --wait {arguments.wait:g}: must be a number of seconds, not negative")
    async with (
        Client(arguments.address) as client,
        client.acquire(arguments.pool, timeout=arguments.wait) as box,
    ):
        if arguments.json:
            return _say_result(box.name, await _gathered(box, arguments))
        end = await terminal.run(
            box,
            arguments.argv,
            on_terminal=arguments.tty,
            interactive=arguments.interactive,
            options={"timeout": arguments.timeout, "user": arguments.user},
        )
    if end.reason is ExitReason.EXITED and end.exit_code == 0:
        return 0
    print(f"sandboxd: {_ending(end, arguments)}", file=sys.stderr)
    return 1


async def _gathered(box: Box, arguments: argparse.Namespace) -> ExecResult:
    """Head and tail of what it printed, in one message."""
    return await box.exec(
        arguments.argv,
        stdin=await terminal.given_input(),
        timeout=arguments.timeout,
        user=arguments.user,
        output_limit=RUN_OUTPUT_LIMIT_BYTES,
        output_tail=OUTPUT_TAIL_BYTES,
    )


def _say_result(name: str, result: ExecResult) -> int:
    told: dict[str, object] = {"sandbox": name, "reason": result.reason, "exit_code": result.exit_code}
    told |= {"signal": result.signal, "detail": result.detail, "wall": result.wall, "cpu": result.cpu}
    for stream, cut in (("stdout", result.stdout_cut), ("stderr", result.stderr_cut)):
        told[stream] = getattr(result, stream).decode(errors="replace")
        told[f"{stream}_dropped"] = cut.dropped if cut else 0
    print(json.dumps(told))
    return 0 if result.ok else 1


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
    console().print(table)
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
    output = console()
    output.print(table)
    for name, stats in pools.items():
        if stats.last_failure:
            what = "DEGRADED" if stats.state is PoolState.DEGRADED else "last failed start"
            output.print(f"{name}: {what}: {stats.last_failure}", soft_wrap=True)
    return 0


async def set_pool(arguments: argparse.Namespace) -> int:
    """`sandboxd pool set`."""
    if arguments.warm is None and arguments.size_limit is None:
        raise ConfigError("pool set: name what to change: --warm N or --size-limit N")
    async with Client(arguments.address) as client:
        stats = await client.update_pool(arguments.pool, warm=arguments.warm, size_limit=arguments.size_limit)
    words = f"{arguments.pool}: {stats.warm_target} kept warm, at most {stats.size_limit}"
    say(words, {"pool": arguments.pool, **dataclasses.asdict(stats)}, as_json=arguments.json)
    return 0
