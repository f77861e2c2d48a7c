"""How many sandboxes a second become ready with so many starting at once, and with what is found out."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sandboxd.bench.result import Result
from sandboxd.bench.session import ACQUIRE_TIMEOUT_SECONDS, POOL, PoolOptions, own_daemon
from sandboxd.client import Client
from sandboxd.errors import BackendUnavailable
from sandboxd.types import PoolStats

LIMITS = (1, 2, 4, 8, 16, 32, 64)
LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure: a pool is filled with `count` sandboxes `rounds` times for each of the fixed
    `limits`, and as often without one; each on a daemon of its own.
    """

    count: int
    backend: str
    image: str | None = None
    limits: Sequence[int] = LIMITS
    rounds: int = 3


async def run(options: Options) -> Result:
    """Raises BackendUnavailable when a daemon cannot be started or a pool not be filled."""
    result = Result("starts", options.backend, options.rounds * (len(options.limits) + 1))
    fixed = {limit: await _rates(options, limit, result) for limit in options.limits}
    found: list[int] = []
    adaptive = await _rates(options, None, result, found)
    result.wall = sum(result.samples["fill"])
    best = max(fixed, key=lambda limit: statistics.median(fixed[limit]))
    result.more["starts"] = {
        "count": options.count,
        "fixed_per_s": {str(limit): rates for limit, rates in fixed.items()},
        "adaptive_per_s": adaptive,
        "adaptive_limits": found,
        "best": best,
        "adaptive_of_best": statistics.median(adaptive) / statistics.median(fixed[best]),
    }
    return result


async def _rates(
    options: Options, limit: int | None, result: Result, found: list[int] | None = None
) -> list[float]:
    """Sandboxes a second of each round; `found` takes the limit after each."""
    part = Result(result.shape, result.backend, result.count)
    # One is there before: what the first start alone costs (the look at the image) is not what is measured.
    pool = PoolOptions(options.backend, options.image, options.count + 1, warm=1, start_limit=limit)
    rates = []
    async with own_daemon(pool, part) as client:
        for _ in range(options.rounds):
            begin = time.perf_counter()
            await client.update_pool(POOL, warm=1 + options.count)
            stats = await _settled(client, 1 + options.count)
            seconds = time.perf_counter() - begin
            result.add("fill", seconds)
            rates.append(options.count / seconds)
            if found is not None:
                found.append(stats.start_limit)
            await client.update_pool(POOL, warm=1)
            await _settled(client, 1)
    result.host = result.host or part.host
    for kind, count in part.leaked.items():
        result.leaked[kind] = result.leaked.get(kind, 0) + count
    return rates


async def _settled(client: Client, warm: int) -> PoolStats:
    """Once so many are ready and none is on its way. Raises BackendUnavailable where one fails."""
    deadline = time.monotonic() + ACQUIRE_TIMEOUT_SECONDS
    while True:
        stats = await client.get_pool(POOL)
        if (stats.warm, stats.deleting) == (warm, 0):
            return stats
        if stats.start_failures_total or time.monotonic() > deadline:
            why = stats.last_failure or f"{stats.warm} of {warm} after {ACQUIRE_TIMEOUT_SECONDS:g} s"
            raise BackendUnavailable(f"the pool cannot be filled: {why}")
        await asyncio.sleep(LOOK_SECONDS)
