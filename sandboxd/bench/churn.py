"""Acquire, run one command, release, over and over, for a while: what a pool gives in a steady state."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sandboxd.bench import load
from sandboxd.bench.plan import Plan
from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, Session, Target, run_command, session


@dataclass(frozen=True, slots=True)
class Options:
    """`callers` at once for `seconds`, on a pool that keeps `warm` sandboxes ready (a running daemon's keeps
    what it keeps); the callers are spread over `clients` processes.
    """

    target: Target = field(default_factory=Target)
    callers: int = 8
    warm: int = 64
    seconds: float = 10.0
    start_limit: int | None = None
    clients: int = 1


async def run(options: Options) -> Result:
    """Raises BackendUnavailable when the daemon cannot be started or reached."""
    result = Result("churn", options.target.name, 0)
    there = options.target.address is not None
    pool = PoolOptions(
        options.callers if there else options.warm + options.callers,
        warm=0 if there else options.warm,
        start_limit=options.start_limit,
    )
    async with session(options.target, pool, result) as opened:
        target = (await opened.stats()).warm_target
        visits = Plan(
            opened.client.address,
            opened.pool,
            opened.label,
            callers=options.callers,
            seconds=options.seconds,
        )
        done, readings = await load.put(opened, visits, min(options.clients, options.callers))
    load.note(done, readings, result)
    result.samples["release"] = [
        visit.released - visit.done
        for visit in done.visits
        if visit.released is not None and visit.done is not None
    ]
    levels = [reading.warm for reading in readings.taken]
    mean = sum(levels) / len(levels) if levels else None
    level = {"target": target, "mean": mean, "least": min(levels, default=None)}
    result.more |= {"callers": options.callers, "warm_level": level}
    result.count = len(done.visits)
    return result


async def cycle(opened: Session, result: Result) -> None:
    """Acquires a sandbox, runs a command and releases it, each timed."""
    times = [time.perf_counter()]
    async with opened.acquire() as box:
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
