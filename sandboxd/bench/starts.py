"""How many sandboxes a second become ready with so many starting at once, and with what is found out."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandboxd.bench.result import Result
from sandboxd.bench.session import ACQUIRE_TIMEOUT_SECONDS, POOL, PoolOptions, Target, session
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
    target: Target = field(default_factory=Target)
    limits: Sequence[int] = LIMITS
    rounds: int = 3


async def run(options: Options) -> Result:
    """Raises BackendUnavailable when a daemon cannot be started or a pool not be filled."""
    limits = [*options.limits, None]
    result = Result("starts", options.target.name, options.rounds * len(limits))
    rates: dict[int | None, list[float]] = {limit: [] for limit in limits}
    found: list[int] = []
    parts = []
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for limit in limits:
            # One is there before: what the first start alone costs is not what is measured.
            pool = PoolOptions(options.count + 1, warm=1, start_limit=limit)
            parts.append(Result(result.shape, result.backend, result.count))
            opened = await stack.enter_async_context(session(options.target, pool, parts[-1]))
            clients[limit] = opened.client
        # In turn, so that a host that is busy for a while is so for all of them.
        for _ in range(options.rounds):
            for limit, client in clients.items():
                rates[limit].append(
                    await _fill(client, options.count, result, found if limit is None else None)
                )
    result.host = parts[0].host
    for part in parts:
        for kind, count in part.leaked.items():
            result.leaked[kind] = result.leaked.get(kind, 0) + count
    result.wall = sum(result.samples["fill"])
    result.more["starts"] = _compared(rates, found, options)
    return result


def _compared(rates: dict[int | None, list[float]], found: list[int], options: Options) -> dict[str, object]:
    best = max(options.limits, key=lambda limit: statistics.median(rates[limit]))
    return {
        "count": options.count,
        "fixed_per_s": {str(limit): rates[limit] for limit in options.limits},
        "adaptive_per_s": rates[None],
        "adaptive_limits": found,
        "best": best,
        "adaptive_of_best": statistics.median(rates[None]) / statistics.median(rates[best]),
    }


async def _fill(client: Client, count: int, result: Result, found: list[int] | None) -> float:
    """Sandboxes a second; `found` takes the limit afterwards."""
    begin = time.perf_counter()
    await client.update_pool(POOL, warm=1 + count)
    stats = await _settled(client, 1 + count)
    seconds = time.perf_counter() - begin
    result.add("fill", seconds)
    if found is not None:
        found.append(stats.start_limit)
    await client.update_pool(POOL, warm=1)
    await _settled(client, 1)
    return count / seconds


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
