"""`sandboxd top`: what the live page shows, in a terminal, as it changes: tables, or lines on a pipe."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncGenerator

from rich.console import Console
from rich.live import Live

from sandboxd.client import Client
from sandboxd.clock import MonotonicClock
from sandboxd.config import ConfigError
from sandboxd.overview import Sections
from sandboxd.recent import Recent
from sandboxd.remote_pools import HEARTBEAT_SECONDS
from sandboxd.runs import followed
from sandboxd.top_tables import lines, tables
from sandboxd.types import PoolStats

# On a terminal ages move, and a run's next step is seen, though no pool has changed.
BEAT_SECONDS = 1.0
Told = dict[str, PoolStats]


async def top(arguments: argparse.Namespace) -> int:
    """Until Ctrl-C, or after the first numbers with --once."""
    if not 0.02 <= arguments.interval <= 60:
        raise ConfigError(f"top --interval {arguments.interval:g}: must be from 0.02 to 60 seconds")
    for directory in arguments.run_directories:
        if not directory.is_dir():
            raise ConfigError(f"top --run {directory}: no such directory; name a run's, as in runs/demo")
    watching = asyncio.ensure_future(_watch(arguments))
    # A handler of its own: Ctrl-C is how this command ends, not how it is broken off.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, watching.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    return 0


async def _watch(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False, markup=False)
    live = console.is_terminal and not (arguments.json or arguments.once)
    beat = BEAT_SECONDS if live or arguments.run_directories else HEARTBEAT_SECONDS
    runs = followed(arguments.run_directories)
    async with (
        Client(arguments.address) as client,
        contextlib.aclosing(_told(client, arguments, max(beat, arguments.interval))) as watch,
    ):
        recent = Recent(client, arguments.pool, runs, MonotonicClock())
        screen = Live(console=console, auto_refresh=False, screen=False) if live else None
        with screen or contextlib.nullcontext():
            async for pools in watch:
                known = await recent.look(pools)
                if screen is not None:
                    screen.update(tables(known, time.time(), console.width), refresh=True)
                else:
                    _show(console, known, as_json=arguments.json)
                if arguments.once:
                    return


async def _told(client: Client, arguments: argparse.Namespace, beat: float) -> AsyncGenerator[Told, None]:
    if arguments.pool is None:
        watch = client.watch_pools(interval=arguments.interval, heartbeat=beat)
        async with contextlib.aclosing(watch) as all_pools:
            async for pools in all_pools:
                yield pools
    else:
        one = client.watch_pool(arguments.pool, interval=arguments.interval, heartbeat=beat)
        async with contextlib.aclosing(one) as its:
            async for stats in its:
                yield {arguments.pool: stats}


def _show(console: Console, known: Sections, *, as_json: bool) -> None:
    now = time.time()
    if as_json:
        print(json.dumps({"time": now, **known}), flush=True)
    elif console.is_terminal:
        console.print(tables(known, now, console.width))
    else:
        print("\n".join(lines(known, now)), flush=True)
