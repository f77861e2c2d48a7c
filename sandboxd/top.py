"""`sandboxd top`: the pools' numbers as they change, a table on a terminal, else a line for each change."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sandboxd.client import Client
from sandboxd.config import ConfigError
from sandboxd.recent import Recent, failed_total
from sandboxd.types import PoolState, PoolStats

COUNTS = ("WARM", "STARTING", "ACTIVE", "WAITING", "FAILED", "DELETING", "START", "PER S", "NEXT", "OLDEST")
COLOURS = {
    PoolState.OK: "green",
    PoolState.DEGRADED: "yellow",
    PoolState.DRAINING: "blue",
    PoolState.UNAVAILABLE: "red",
}
Told = dict[str, PoolStats]


async def top(arguments: argparse.Namespace) -> int:
    """Until Ctrl-C, or after the first numbers with --once."""
    if not 0.02 <= arguments.interval <= 60:
        raise ConfigError(f"top --interval {arguments.interval:g}: must be from 0.02 to 60 seconds")
    watching = asyncio.ensure_future(_watch(arguments))
    # A handler of its own: Ctrl-C is how this command ends, not how it is broken off.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, watching.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    return 0


async def _watch(arguments: argparse.Namespace) -> None:
    console = Console()
    live = console.is_terminal and not (arguments.json or arguments.once)
    async with Client(arguments.address) as client, contextlib.aclosing(_told(client, arguments)) as watch:
        recent = Recent(client, arguments.pool) if console.is_terminal and not arguments.json else None
        screen = Live(console=console, auto_refresh=False, screen=False) if live else None
        with screen or contextlib.nullcontext():
            async for pools in watch:
                if recent is not None:
                    await recent.look(pools)
                    (screen.update if screen else console.print)(_tables(pools, recent))
                    if screen:
                        screen.refresh()
                else:
                    _show(pools, as_json=arguments.json)
                if arguments.once:
                    return


async def _told(client: Client, arguments: argparse.Namespace) -> AsyncGenerator[Told, None]:
    if arguments.pool is None:
        async with contextlib.aclosing(client.watch_pools(interval=arguments.interval)) as all_pools:
            async for pools in all_pools:
                yield pools
    else:
        async with contextlib.aclosing(client.watch_pool(arguments.pool, interval=arguments.interval)) as one:
            async for stats in one:
                yield {arguments.pool: stats}


def _show(pools: Told, *, as_json: bool) -> None:
    if as_json:
        numbers = {name: dataclasses.asdict(stats) for name, stats in pools.items()}
        print(json.dumps({"time": time.time(), "pools": numbers}), flush=True)
        return
    for name, stats in pools.items():
        print(_line(name, stats))
    sys.stdout.flush()


def _tables(pools: Told, recent: Recent) -> Group:
    # A line between two of them; what a sandbox or a caller wrote is no markup.
    below = [part for table in recent.tables() for part in (Text(), table)]
    return Group(_table(pools), *below)


def _table(pools: Told) -> Table:
    table = Table("POOL", "STATE", *COUNTS, box=None)
    for name, stats in pools.items():
        table.add_row(name, Text(stats.state, COLOURS[stats.state]), *_cells(stats))
    reasons = [f"{name}: {stats.state_reason}" for name, stats in pools.items() if stats.state_reason]
    if reasons:
        table.caption, table.caption_justify = Text("\n".join(reasons)), "left"
    return table


def _cells(stats: PoolStats) -> list[str]:
    counts = (stats.starting, stats.active, stats.waiting, failed_total(stats), stats.deleting)
    return [
        f"{stats.warm} of {stats.warm_target}",
        *map(str, counts),
        _seconds(stats.start_seconds),
        f"{stats.starts_per_second:.1f}",
        _seconds(stats.next_free_seconds),
        _seconds(stats.oldest_wait_seconds),
    ]


def _seconds(value: float | None) -> str:
    """For a narrow column: milliseconds below a second."""
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _line(name: str, stats: PoolStats) -> str:
    cells = zip(COUNTS, _cells(stats), strict=True)
    said = "  ".join(f"{title.lower()} {cell}" for title, cell in cells)
    return f"{time.strftime('%H:%M:%S')}  {name}  {stats.state}  {said}"
