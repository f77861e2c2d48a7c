"""Forks of a sandbox that holds so much: how long they take, and how much of that is not the copy itself."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, Target, all_at_once, noting_failures, run_command, session
from sandboxd.client import Box

MEGABYTE = 1_000_000
# What is written counts as the sandbox's memory until it is on the disk.
MEMORY_BYTES = 4 << 30
FILL = 'head -c "$1" /dev/urandom > data && sync data'
# The same bytes copied once inside the sandbox: what any fork costs at least.
COPY = "cp data copy && rm copy"
WORK_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Options:
    """`count` forks at once of a sandbox with `megabytes` in one file, `rounds` times over."""

    target: Target = field(default_factory=Target)
    count: int = 8
    megabytes: int = 1
    rounds: int = 5


async def run(options: Options) -> Result:
    """Raises BackendUnavailable when the daemon cannot be started or reached."""
    result = Result("fork", options.target.name, options.count * options.rounds)
    result.samples = {"ready": [], "exec": []}
    limits = {"memory_bytes": MEMORY_BYTES}
    pool = PoolOptions(options.count + 1, limits=limits)
    copies: list[float] = []
    forks: list[float] = []
    async with session(options.target, pool, result) as opened, opened.acquire() as box:
        await _work(box, FILL, str(options.megabytes * MEGABYTE))
        for _ in range(options.rounds):
            copies.append(await _work(box, COPY))
            with noting_failures(result):
                forks.append(await _round(box, options.count, result))
    result.wall = sum(forks)
    if forks:
        copy, fork = statistics.median(copies), statistics.median(forks)
        beyond = (fork - copy) / options.count
        result.more = {
            "fork": {
                "megabytes": options.megabytes,
                "at_once": options.count,
                "copy_s": copy,
                "fork_s": fork,
                "beyond_copy_s_each": beyond,
            }
        }
    return result


async def _work(box: Box, script: str, *arguments: str) -> float:
    begin = time.perf_counter()
    done = await box.exec(["sh", "-c", script, "sh", *arguments], timeout=WORK_SECONDS)
    if not done.ok:
        raise RuntimeError(f"{script!r} ended as {done.reason} {done.exit_code}: {done.stderr!r}")
    return time.perf_counter() - begin


async def _round(box: Box, count: int, result: Result) -> float:
    begin = time.perf_counter()
    async with box.fork(count) as forks:
        seconds = time.perf_counter() - begin

        async def use(fork: Box) -> None:
            began = time.perf_counter()
            await run_command(fork)
            result.add("exec", time.perf_counter() - began)
            result.add("ready", time.perf_counter() - begin)

        await all_at_once(forks, use)
    return seconds
