"""N callers ask at once for a cold sandbox each; a sandbox counts once its first command has succeeded."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncio_pool import AioPool

from sandboxd.bench import host
from sandboxd.bench.audit import Snapshot
from sandboxd.child import child_daemon, toml_value
from sandboxd.client import Box, Client
from sandboxd.errors import SandboxdError

ACQUIRE_TIMEOUT_SECONDS = 600.0
COMMAND = ["/bin/true"]
COMMAND_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `start_limit` None leaves the pool's default."""

    count: int
    backend: str
    image: str | None = None
    start_limit: int | None = None
    hold_seconds: float = 0.0


@dataclass(slots=True)
class Result:
    """All that was measured; times in seconds, one entry a successful caller."""

    options: Options
    ready: list[float] = field(default_factory=list)
    exec: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall: float = 0.0
    alive_after_hold: int = 0
    leaked: dict[str, int] = field(default_factory=dict)
    host: dict[str, object] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Nothing failed, all lived to the end, and nothing is left."""
        alive = self.alive_after_hold == self.options.count
        return not self.failures and alive and not any(self.leaked.values())

    def to_json(self) -> dict[str, Any]:
        """The keys that stay; see docs/benchmarks.md."""
        return {
            "shape": "burst",
            "backend": self.options.backend,
            "count": self.options.count,
            "failed": len(self.failures),
            "wall_s": self.wall,
            "ready_s": quantiles(self.ready),
            "exec_s": quantiles(self.exec),
            "rate_per_s": len(self.ready) / self.wall if self.wall else None,
            "alive_after_hold": self.alive_after_hold,
            "leaked": self.leaked,
            "host": self.host,
            "baseline": None,
            "failures": self.distinct_failures()[:20],
        }

    def distinct_failures(self) -> list[str]:
        """One message of each kind: those that differ in numbers alone are of one."""
        kinds = {re.sub(r"[0-9.]+", "#", failure): failure for failure in reversed(self.failures)}
        return sorted(kinds.values())


def quantiles(values: list[float]) -> dict[str, float] | None:
    """p50, p90, p99 (nearest rank) and the maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 90, 99)}
    return {**ranks, "max": ordered[-1]}


async def run(options: Options) -> Result:
    """Measures on a daemon of its own, then looks for what that daemon left behind.

    Raises BackendUnavailable when the daemon cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="sandboxd-bench-") as directory:
        state = Path(directory) / "state"
        config = Path(directory) / "bench.toml"
        config.write_text(_settings(options))
        result = Result(options, host=host.facts())
        before = Snapshot.take(state)
        async with child_daemon(state, config=config, log=Path(directory) / "daemon.log") as address:
            await _measure(address, result)
        result.leaked = Snapshot.take(state).since(before)
    return result


def _settings(options: Options) -> str:
    lines = [
        "[pools.bench]",
        f"backend = {toml_value(options.backend)}",
        "warm = 0",
        f"size_limit = {2 * options.count + 64}",
        f"waiting_limit = {options.count}",
        "ttl_seconds = 3600",
        "retry.attempts = 1",
        # A start waits for nothing but the host; what is slow must show as slow, not as failed.
        f"start_timeout_seconds = {ACQUIRE_TIMEOUT_SECONDS}",
    ]
    if options.image:
        lines.append(f"image = {toml_value(options.image)}")
    if options.start_limit:
        lines.append(f"start_limit = {options.start_limit}")
    return "\n".join(lines) + "\n"


async def _measure(address: str, result: Result) -> None:
    boxes: list[Box] = []
    async with Client(address) as client:
        await client.get_pool("bench")
        begin = time.perf_counter()

        async def caller(_: int) -> None:
            try:
                await _one(client, boxes, result)
            except SandboxdError as error:
                result.failures.append(f"{error.reason}: {error}")

        await _all_at_once(range(result.options.count), caller)
        result.wall = time.perf_counter() - begin
        await asyncio.sleep(result.options.hold_seconds)
        await _all_at_once(boxes, lambda box: _second_check(box, result))
        await _all_at_once(boxes, lambda box: box.release())


async def _one(client: Client, boxes: list[Box], result: Result) -> None:
    begin = time.perf_counter()
    box = await client.acquire("bench", timeout=ACQUIRE_TIMEOUT_SECONDS)
    boxes.append(box)
    acquired = time.perf_counter()
    end = await box.exec(COMMAND, timeout=COMMAND_TIMEOUT_SECONDS)
    done = time.perf_counter()
    if not end.ok:
        result.failures.append(f"the first command ended as {end.reason} {end.exit_code}")
        return
    result.ready.append(done - begin)
    result.exec.append(done - acquired)


async def _second_check(box: Box, result: Result) -> None:
    try:
        end = await box.exec(COMMAND, timeout=COMMAND_TIMEOUT_SECONDS)
    except SandboxdError as error:
        result.failures.append(f"after the hold: {error.reason}: {error}")
        return
    result.alive_after_hold += end.ok


async def _all_at_once(items: Any, act: Callable[[Any], Awaitable[None]]) -> None:
    items = list(items)
    async with AioPool(size=max(1, len(items))) as pool:
        for item in items:
            pool.spawn_n(act(item))
