"""N callers ask at once for a sandbox each, cold or warm; one counts once its first command succeeded."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from sandboxd.bench.health import asked_meanwhile
from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, acquire, all_at_once, noting_failures, own_daemon, run_command
from sandboxd.client import Box, Client


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `warm`: the pool holds all `count` before the callers ask."""

    count: int
    backend: str
    image: str | None = None
    start_limit: int | None = None
    hold_seconds: float = 0.0
    warm: bool = False


async def run(options: Options) -> Result:
    """Measures on a daemon of its own, then looks for what that daemon left behind.

    Raises BackendUnavailable when the daemon cannot be started.
    """
    result = Result("burst", options.backend, options.count, alive=0)
    # Named here so that the table has them in this order.
    result.samples = {"ready": [], "acquire": [], "exec": []}
    result.more = {"warm": options.warm, "hold_s": options.hold_seconds}
    pool = PoolOptions(
        options.backend,
        options.image,
        options.count,
        warm=options.count if options.warm else 0,
        start_limit=options.start_limit,
    )
    async with own_daemon(pool, result) as client:
        await _measure(client, options, result)
    return result


async def _measure(client: Client, options: Options, result: Result) -> None:
    boxes: list[Box] = []

    async def caller(_: int) -> None:
        with noting_failures(result):
            await _one(client, boxes, result)

    async with asked_meanwhile(client.address, result):
        begin = time.perf_counter()
        await all_at_once(range(options.count), caller)
        result.wall = time.perf_counter() - begin
    await asyncio.sleep(options.hold_seconds)
    await all_at_once(boxes, lambda box: _second_check(box, result))
    await all_at_once(boxes, lambda box: box.release())


async def _one(client: Client, boxes: list[Box], result: Result) -> None:
    begin = time.perf_counter()
    box = await acquire(client)
    boxes.append(box)
    acquired = time.perf_counter()
    end = await run_command(box)
    done = time.perf_counter()
    if not end.ok:
        result.failures.append(f"the first command ended as {end.reason} {end.exit_code}")
        return
    result.add("ready", done - begin)
    result.add("acquire", acquired - begin)
    result.add("exec", done - acquired)


async def _second_check(box: Box, result: Result) -> None:
    with noting_failures(result, "after the hold: "):
        end = await run_command(box)
        result.alive = (result.alive or 0) + end.ok
