"""`sandboxd inspect`: all that is known of one sandbox, or why sandboxes failed of late."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator

from rich.table import Table

from sandboxd.client import Client
from sandboxd.config import ConfigError
from sandboxd.inspection_replies import SandboxFailure, SandboxReport
from sandboxd.output import console


async def inspect(arguments: argparse.Namespace) -> int:
    """`sandboxd inspect NAME`, `sandboxd inspect --failures [POOL]`."""
    if not arguments.failures and arguments.name is None:
        raise ConfigError("inspect: name a sandbox (`sandboxd ls` lists them), or ask for --failures")
    async with Client(arguments.address) as client:
        if arguments.failures:
            _show_failures(await client.list_failures(arguments.name), as_json=arguments.json)
        else:
            _show(await client.inspect(arguments.name), as_json=arguments.json)
    return 0


def _show(report: SandboxReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    table = Table.grid(padding=(0, 2))
    for key, value in _lines(report, time.time()):
        table.add_row(key, value)
    # Whatever the sandbox printed must not be taken for markup.
    console().print(table)


def _lines(report: SandboxReport, now: float) -> Iterator[tuple[str, str]]:
    info = report.info
    yield "sandbox", info.name
    yield "pool", info.pool
    yield "state", info.state
    if info.state != "GONE":
        yield "age", f"{now - info.created:.0f} s"
        yield "leases", str(report.uses)
    if report.start_seconds is not None:
        yield "start took", f"{report.start_seconds * 1e3:.1f} ms"
    if report.answered is not None:
        yield "last answer", f"{now - report.answered:.0f} s ago"
    if info.expires is not None:
        yield "lease ends in", f"{info.expires - now:.0f} s"
    for key, value in info.labels.items():
        yield "label", f"{key}={value}"
    yield from report.place.items()
    if (failure := report.failure) is not None:
        yield "failed", f"{now - failure.when:.0f} s ago, phase {failure.phase}, {failure.cause}"
        yield "because", failure.message
        if failure.log:
            yield "its last lines", failure.log.rstrip("\n")


def _show_failures(failures: list[SandboxFailure], *, as_json: bool) -> None:
    if as_json:
        for failure in failures:
            print(json.dumps(dataclasses.asdict(failure)))
        return
    table = Table("SANDBOX", "AGO", "PHASE", "ATTEMPT", "CAUSE", "BECAUSE", box=None)
    now = time.time()
    for failure in failures:
        ago, attempt = f"{now - failure.when:.0f} s", str(failure.attempt)
        table.add_row(failure.sandbox, ago, failure.phase, attempt, failure.cause, failure.message)
    console().print(table)
