"""Commands in sandboxes that are there already: one at a time, many at once, and those that print much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from sandboxd.bench.processes import Usage, serving_pid
from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, Target, all_at_once, noting_failures, run_command, session
from sandboxd.client import Box, Client
from sandboxd.types import Exited, Stdout

WARM_UP_COMMANDS = 20
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """`count` commands one after the other, `count` more by `concurrency` callers with a sandbox each, then
    `output_bytes` through one command and through `streams` at once, in all."""

    count: int
    target: Target = field(default_factory=Target)
    concurrency: int = 64
    streams: int = 32
    output_bytes: int = 200 * MEGABYTE


async def run(options: Options) -> Result:
    """Raises BackendUnavailable when the daemon cannot be started or reached."""
    result = Result("exec", options.target.name, options.count)
    boxes_wanted = max(options.concurrency, options.streams)
    pool = PoolOptions(boxes_wanted, warm=boxes_wanted)
    async with session(options.target, pool, result) as opened:
        boxes = [await opened.acquire() for _ in range(boxes_wanted)]
        await _one_at_a_time(boxes[0], options, result)
        await _many_at_once(boxes[: options.concurrency], options, result)
        await _output(opened.client, boxes[: options.streams], options, result)
        await all_at_once(boxes, lambda box: box.release())
    return result


async def _one_at_a_time(box: Box, options: Options, result: Result) -> None:
    result.samples["exec"] = []
    for _ in range(WARM_UP_COMMANDS):
        await run_command(box)
    begin = time.perf_counter()
    for _ in range(options.count):
        await _timed(box, "exec", result)
    result.wall = time.perf_counter() - begin


async def _timed(box: Box, name: str, result: Result) -> None:
    began = time.perf_counter()
    with noting_failures(result):
        end = await run_command(box)
        if end.ok:
            result.add(name, time.perf_counter() - began)
        else:
            result.failures.append(f"a command ended as {end.reason} {end.exit_code}")


async def _many_at_once(boxes: Sequence[Box], options: Options, result: Result) -> None:
    left = options.count

    async def caller(box: Box) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await _timed(box, "exec_at_once", result)

    begin = time.perf_counter()
    await all_at_once(boxes, caller)
    wall = time.perf_counter() - begin
    done = len(result.samples.get("exec_at_once", ()))
    result.more["at_once"] = {"callers": len(boxes), "wall_s": wall, "rate_per_s": done / wall}


async def _output(client: Client, boxes: Sequence[Box], options: Options, result: Result) -> None:
    """Bytes a second through one command and through many; both also with the daemon's memory after it."""
    found: dict[str, object] = {"bytes": options.output_bytes, "streams": len(boxes)}
    for name, printers in (("one", boxes[:1]), ("many", boxes)):
        share = options.output_bytes // len(printers)
        begin = time.perf_counter()
        await all_at_once(printers, partial(_print, share, result))
        found[f"{name}_mb_per_s"] = share * len(printers) / (time.perf_counter() - begin) / MEGABYTE
        found[f"{name}_daemon_bytes"] = await asyncio.to_thread(_daemon_memory, client)
    result.more["output"] = found


async def _print(size: int, result: Result, box: Box) -> None:
    seen, end = 0, None
    async for event in box.stream(["head", "-c", str(size), "/dev/zero"]):
        match event:
            case Stdout(data):
                seen += len(data)
            case Exited():
                end = event
    if end is None or end.exit_code or seen != size:
        result.failures.append(f"{seen} of {size} bytes came through, the command ended as {end}")


def _daemon_memory(client: Client) -> int | None:
    """Resident bytes of the daemon; None where it is no process of this host that can be looked at."""
    pid = serving_pid(client.address)
    return None if pid is None else Usage.of(pid).rss_bytes
