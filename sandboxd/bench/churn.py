"""Acquire, run one command, release, over and over, for a while: what a pool gives in a steady state."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from sandboxd.bench.result import Result
from sandboxd.bench.session import (
    POOL,
    PoolOptions,
    acquire,
    all_at_once,
    noting_failures,
    own_daemon,
    run_command,
)
from sandboxd.client import Client

LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """`callers` at once for `seconds`, on a pool that keeps `warm` sandboxes ready."""

    backend: str
    image: str | None = None
    callers: int = 8
    warm: int = 64
    seconds: float = 10.0
    start_limit: int | None = None


async def run(options: Options) -> Result:
    """Measures on a daemon of its own. Raises BackendUnavailable when that cannot be started."""
    result = Result("churn", options.backend, 0)
    result.samples = {"ready": [], "acquire": [], "exec": [], "release": []}
    pool = PoolOptions(
        options.backend,
        options.image,
        options.warm + options.callers,
        warm=options.warm,
        start_limit=options.start_limit,
    )
    async with own_daemon(pool, result) as client:
        levels: list[int] = []
        looking = asyncio.create_task(_look(client, levels))
        try:
            await _turn(client, options, result)
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        mean = sum(levels) / len(levels) if levels else None
        level = {"target": options.warm, "mean": mean, "least": min(levels, default=None)}
        result.more = {"callers": options.callers, "warm_level": level}
    result.count = result.successes + len(result.failures)
    return result


async def _turn(client: Client, options: Options, result: Result) -> None:
    begin = time.perf_counter()
    end = begin + options.seconds

    async def caller(_: int) -> None:
        while time.perf_counter() < end:
            with noting_failures(result):
                await cycle(client, result)

    await all_at_once(range(options.callers), caller)
    result.wall = time.perf_counter() - begin


async def cycle(client: Client, result: Result) -> None:
    """Acquires a sandbox, runs a command and releases it, each timed."""
    times = [time.perf_counter()]
    async with acquire(client) as box:
        times.append(time.perf_counter())
        end = await run_command(box)
        times.append(time.perf_counter())
    times.append(time.perf_counter())
    if not end.ok:
        result.failures.append(f"a command ended as {end.reason} {end.exit_code}")
        return
    result.add("ready", times[2] - times[0])
    for name, began, done in zip(("acquire", "exec", "release"), times[:-1], times[1:], strict=True):
        result.add(name, done - began)


async def _look(client: Client, levels: list[int]) -> None:
    """Notes how many sandboxes are warm, twice a second."""
    while True:
        levels.append((await client.get_pool(POOL)).warm)
        await asyncio.sleep(LOOK_SECONDS)
