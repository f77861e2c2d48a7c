"""Sandboxes that do their worst beside others that work: what those notice, and whether all survive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, Target, all_at_once, noting_failures, run_command, session
from sandboxd.client import Box

LIMITS = {
    "memory_bytes": 128 << 20,
    "cpu_count": 0.25,
    "pids": 64,
    "open_files": 256,
    "disk_bytes": 32 << 20,
}
# Each goes on until it is killed, and meets its limit over and over.
BOMBS = {
    "forks": 'while :; do sh -c "while :; do sleep 1 & done"; done',
    "memory": 'while :; do python3 -c "x = []\nwhile True: x.append(bytes(1 << 20))"; done',
    "disk": "while :; do cat /dev/zero >f; cat /dev/zero >/tmp/f; rm f /tmp/f; done",
    "descriptors": "while :; do python3 -c \"x = []\nwhile True: x.append(open('/dev/null'))\"; done",
    "output": "exec yes",
    "processor": "for n in 1 2 3 4; do (while :; do :; done) & done; wait",
}
OUTPUT_BYTES = 64 << 10
# Beyond the time that the bombs are given to run.
SURVIVAL_SECONDS = 30.0
PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Options:
    """`bombs` sandboxes, a kind each by turns, beside `count` others in which `callers` run commands, for
    `seconds` without the bombs and as long with them.
    """

    count: int
    target: Target = field(default_factory=Target)
    bombs: int = 10
    callers: int = 4
    seconds: float = 10.0


async def run(options: Options) -> Result:
    """Measures on a daemon of its own. Raises BackendUnavailable when that cannot be started."""
    result = Result("bombs", options.target.name, options.count)
    wanted = options.count + options.bombs
    pool = PoolOptions(wanted, warm=wanted, limits=LIMITS)
    async with session(options.target, pool, result) as opened:
        boxes = [await opened.acquire() for _ in range(wanted)]
        bombs, others = boxes[: options.bombs], boxes[options.bombs :]
        began = time.perf_counter()
        await _work(others, "exec", options, result)
        # Docker does not bound the disk: that bomb would fill the host's.
        kinds = [kind for kind in BOMBS if kind != "disk" or options.target.backend != "docker"]
        storm = [
            asyncio.create_task(_explode(box, kinds[number % len(kinds)], options, result))
            for number, box in enumerate(bombs)
        ]
        await _work(others, "exec_beside_bombs", options, result)
        await asyncio.gather(*storm)
        result.wall = time.perf_counter() - began
        survivors: list[Box] = []
        await all_at_once(boxes, lambda box: _check(box, survivors, result))
        result.alive = sum(box in survivors for box in others)
        result.more["bombs"] = {"count": options.bombs, "callers": options.callers, "limits": LIMITS}
        await all_at_once(boxes, lambda box: box.release())
    return result


async def _work(boxes: Sequence[Box], name: str, options: Options, result: Result) -> None:
    """Callers go round the sandboxes with pauses, as rollouts do that wait for their model."""
    end = time.perf_counter() + options.seconds

    async def caller(first: int) -> None:
        number = first
        while time.perf_counter() < end:
            began = time.perf_counter()
            with noting_failures(result, f"{name}: "):
                done = await run_command(boxes[number % len(boxes)])
                if done.ok:
                    result.add(name, time.perf_counter() - began)
                else:
                    result.failures.append(f"a bystander's command ended as {done.reason} {done.exit_code}")
            number += options.callers
            await asyncio.sleep(PAUSE_SECONDS)

    await all_at_once(range(options.callers), caller)


async def _explode(box: Box, kind: str, options: Options, result: Result) -> None:
    with noting_failures(result, f"{kind} bomb: "):
        await box.exec(
            ["sh", "-c", BOMBS[kind]],
            timeout=options.seconds,
            output_limit=OUTPUT_BYTES,
            output_tail=OUTPUT_BYTES // 2,
        )


async def _check(box: Box, survivors: list[Box], result: Result) -> None:
    with noting_failures(result, "afterwards: "):
        end = await box.exec(["true"], timeout=SURVIVAL_SECONDS)
        if end.ok:
            survivors.append(box)
        else:
            result.failures.append(f"afterwards: a command ended as {end.reason} {end.exit_code}")
