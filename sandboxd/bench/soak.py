"""Acquire, run one command, release, a hundred thousand times: what grows meanwhile.

Every so many cycles all callers stop, the pool comes to rest, and the processes are looked at: at rest they
hold the same each time. What grows is the slope of a line through these looks, the first tenth left out; of
memory the first half, for by then what is bounded is full, while a leak goes on to the end.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from sandboxd.bench.churn import cycle
from sandboxd.bench.processes import Usage, launcher_pid, state_directory
from sandboxd.bench.result import Result, quantiles
from sandboxd.bench.session import PoolOptions, Session, Target, all_at_once, noting_failures, session
from sandboxd.config import ConfigError
from sandboxd.errors import BackendUnavailable

LOOKS = 100
REST_SECONDS, REST_PAUSE_SECONDS = 60.0, 0.01
PER = 1000
# Fewer cycles say nothing of a trend in latency.
LATENCY_CYCLES = 10_000


@dataclass(frozen=True, slots=True)
class Options:
    """`cycles` in all, by `callers` at once, on a pool that keeps `warm` sandboxes ready."""

    target: Target = field(default_factory=Target)
    cycles: int = 100_000
    callers: int = 16
    warm: int = 16

    @property
    def every(self) -> int:
        """Cycles between two looks."""
        return max(self.callers, self.cycles // LOOKS)


@dataclass(frozen=True, slots=True)
class Bound:
    """How much may be added in 1,000 cycles; what is less than `noise` in the whole run is no growth. Looks
    count after the part `after` of the cycles.
    """

    per_1000: float
    noise: float
    after: float = 0.1


MEMORY, COUNT = Bound(64 << 10, 2 << 20, after=0.5), Bound(0.05, 4)
BOUNDS = {
    "daemon_rss_bytes": MEMORY,
    "daemon_fds": COUNT,
    "daemon_threads": COUNT,
    "launcher_rss_bytes": MEMORY,
    "launcher_fds": COUNT,
}
# As parts of the mean.
LATENCY_BOUNDS = {"p50_s": Bound(0.005, 0.5), "p99_s": Bound(0.01, 1.0)}


async def run(options: Options) -> Result:
    """Raises BackendUnavailable when the daemon cannot be started or reached."""
    result = Result("soak", options.target.name, options.cycles)
    result.samples = {"ready": [], "acquire": [], "exec": [], "release": []}
    there = options.target.address is not None
    pool = PoolOptions(
        options.callers if there else options.warm + options.callers, warm=0 if there else options.warm
    )
    looks: list[dict[str, float]] = []
    async with session(options.target, pool, result) as opened:
        daemon, address = opened.daemon_pid(), opened.client.address
        if daemon is None:
            raise ConfigError(
                f"bench soak --address {address}: a soak looks at the daemon's process; run it where that is,"
                " as its user, by its unix: address"
            )
        launcher = await asyncio.to_thread(launcher_pid, state_directory(address))
        done = 0
        while done < options.cycles:
            count = min(options.every, options.cycles - done)
            begin, had = time.perf_counter(), len(result.samples["ready"])
            await _turn(opened, count, options.callers, result)
            result.wall += time.perf_counter() - begin
            done += count
            await _rest(opened)
            latency = quantiles(result.samples["ready"][had:]) or {"p50": 0.0, "p99": 0.0}
            look = {"cycles": done, "p50_s": latency["p50"], "p99_s": latency["p99"]}
            looks.append(look | await asyncio.to_thread(_look, daemon, launcher))
    growth = growth_of(looks, options)
    result.failures += _beyond(growth)
    result.more["soak"] = {
        "callers": options.callers,
        "every": options.every,
        "growth": growth,
        "looks": looks,
    }
    return result


async def _turn(opened: Session, count: int, callers: int, result: Result) -> None:
    left = count

    async def caller(_: int) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            with noting_failures(result):
                await cycle(opened, result)

    await all_at_once(range(callers), caller)


async def _rest(opened: Session) -> None:
    deadline = time.monotonic() + REST_SECONDS
    while True:
        stats = await opened.stats()
        if not (stats.active or stats.deleting or stats.starting) and stats.warm == stats.warm_target:
            return
        if time.monotonic() > deadline:
            raise BackendUnavailable(f"the pool does not come to rest within {REST_SECONDS:g} s: {stats}")
        await asyncio.sleep(REST_PAUSE_SECONDS)


def _look(daemon: int, launcher: int | None) -> dict[str, float]:
    found = {f"daemon_{key}": value for key, value in asdict(Usage.of(daemon)).items()}
    # What it used grows with the work.
    del found["daemon_cpu_seconds"]
    if launcher is not None:
        usage = Usage.of(launcher)
        found |= {"launcher_rss_bytes": usage.rss_bytes, "launcher_fds": usage.fds}
    return found


def growth_of(looks: list[dict[str, float]], options: Options) -> dict[str, Any]:
    """Of each measure: the slope, its bound, and what the line adds over all the cycles that count."""
    growth = {}
    for name, bound in (BOUNDS | LATENCY_BOUNDS).items():
        counted = [look for look in looks if name in look and look["cycles"] > options.cycles * bound.after]
        if len(counted) < 2:
            continue
        cycles, values = [look["cycles"] for look in counted], [look[name] for look in counted]
        scale = statistics.mean(values) if name in LATENCY_BOUNDS else 1.0
        slope = statistics.linear_regression(cycles, values).slope
        added = slope * (cycles[-1] - cycles[0])
        judged = name in BOUNDS or options.cycles >= LATENCY_CYCLES
        growth[name] = {
            "per_1000_cycles": slope * PER,
            "bound": bound.per_1000 * scale,
            "added": added,
            "first": values[0],
            "last": values[-1],
            "flat": not judged or slope * PER <= bound.per_1000 * scale or added <= bound.noise * scale,
        }
    return growth


def _beyond(growth: dict[str, Any]) -> list[str]:
    return [
        f"{name} grows by {each['per_1000_cycles']:.3g} in 1,000 cycles, by {each['added']:.3g} in all;"
        f" allowed are {each['bound']:.3g} in 1,000"
        for name, each in growth.items()
        if not each["flat"]
    ]
