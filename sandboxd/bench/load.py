"""A load on a daemon: client processes make visits, while the bench itself only reads what goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from sandboxd.bench import phases
from sandboxd.bench.child_process import child_process
from sandboxd.bench.client_limit import Shares
from sandboxd.bench.plan import Plan, Visit
from sandboxd.bench.readings import Readings, thinned
from sandboxd.bench.result import Result, quantiles
from sandboxd.bench.session import Session
from sandboxd.errors import BackendUnavailable

# From the word to the processes until the load begins: all of them have heard it by then.
LEAD_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Process:
    """One client process, which is talked to in lines."""

    child: subprocess.Popen[str]

    def say(self, line: str) -> None:
        if self.child.stdin is None:
            raise AssertionError("the client process was started with a pipe")
        # One that has ended is noticed when it is listened to.
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()

    async def hear(self) -> dict[str, Any]:
        """Raises BackendUnavailable when the process has ended."""
        if self.child.stdout is None:
            raise AssertionError("the client process was started with a pipe")
        line = await asyncio.to_thread(self.child.stdout.readline)
        if not line:
            code = await asyncio.to_thread(self.child.wait)
            raise BackendUnavailable(f"a client process of the load ended with {code}")
        heard: dict[str, Any] = json.loads(line)
        return heard


@dataclass(slots=True)
class Load:
    """What came of a load. `wall` is from its begin until the last visit was served, in seconds."""

    visits: list[Visit] = field(default_factory=list)
    wall: float = 0.0
    shares: Shares = field(default_factory=Shares)


@dataclass(frozen=True, slots=True)
class Rest:
    """Between the last visit and the end of those that are held: so many seconds in which nothing is asked,
    and what is done around them.
    """

    seconds: float = 0.0
    around: AbstractAsyncContextManager[object] = field(default_factory=contextlib.nullcontext)


async def put(
    session: Session,
    plan: Plan,
    clients: int,
    rest: Rest | None = None,
    meanwhile: AbstractAsyncContextManager[object] | None = None,
) -> tuple[Load, Readings]:
    """Has so many client processes make the visits of the plan, and `meanwhile` go on until all were served.
    Where sandboxes are held until the end, that is after `rest`; then each is checked and released.

    Raises BackendUnavailable when the daemon cannot be reached, or a client process dies.
    """
    readings = Readings(session.stats, session.daemon_pid())
    load, rest = Load(), rest or Rest()
    async with _processes(clients) as processes:
        for process, share in zip(processes, plan.shares(clients), strict=True):
            process.say(share.to_line())
        await _all(processes)
        await readings.prepare()
        async with readings.taken_meanwhile():
            async with meanwhile or contextlib.nullcontext():
                readings.begin = begin = time.monotonic() + LEAD_SECONDS
                load.shares.begin(session.daemon_pid())
                told = await _all(processes, {"begin": begin})
                load.shares.end([each["cpu_s"] for each in told], begin)
            if plan.hold is None:
                async with rest.around:
                    await asyncio.sleep(rest.seconds)
                await _all(processes, {"check": True})
        if plan.hold is None:
            told = await _all(processes, {"release": True})
    await readings.finish()
    load.visits = [Visit(*row) for each in told for row in each["visits"]]
    load.wall = max((visit.done or visit.sent for visit in load.visits), default=0.0)
    return load, readings


async def _all(processes: list[_Process], word: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Says the word to all of them, and returns what they answer."""
    if word is not None:
        for process in processes:
            process.say(json.dumps(word))
    return list(await asyncio.gather(*(process.hear() for process in processes)))


@contextlib.asynccontextmanager
async def _processes(count: int) -> AsyncIterator[list[_Process]]:
    async with contextlib.AsyncExitStack() as stack:
        children = [child_process("sandboxd.bench.client_process") for _ in range(count)]
        yield [_Process(await stack.enter_async_context(each)) for each in children]


def note(load: Load, readings: Readings, result: Result) -> None:
    """Enters a load into the result, by the names that docs/benchmarks.md explains."""
    visits = load.visits
    for name, values in _timed(visits).items():
        result.samples[name] = values
    result.failures += [visit.failure for visit in visits if visit.failure]
    result.wall = load.wall
    checked = [visit.alive for visit in visits if visit.alive is not None]
    if checked:
        result.alive = sum(checked)
    served = sum(visit.done is not None for visit in visits)
    result.more["success_rate"] = served / len(visits) if visits else None
    # Not by visit: whose sandbox is tried again may be served with another meanwhile.
    result.more["retries"] = readings.failed_starts[-1] - readings.failed_starts[0]
    result.more["late_s"] = quantiles([visit.sent - visit.due for visit in visits])
    result.more["phases"] = phases.summary(visits)
    result.more["readings"] = readings.to_json()
    result.more["clients"] = load.shares.to_json()
    result.more["ready_over_time"] = ready_over_time(visits)


def _timed(visits: list[Visit]) -> dict[str, list[float]]:
    """Counted from the moment at which each was to begin: a slow server cannot hide behind late questions."""
    samples: dict[str, list[float]] = {"ready": [], "acquire": [], "exec": []}
    for visit in visits:
        if visit.acquired is None or visit.done is None:
            continue
        samples["ready"].append(visit.done - visit.due)
        samples["acquire"].append(visit.acquired - visit.due)
        samples["exec"].append(visit.done - visit.acquired)
    return samples


def ready_over_time(visits: list[Visit]) -> list[tuple[float, int]]:
    """Moments, and how many had been served by then."""
    done = sorted(visit.done for visit in visits if visit.done is not None)
    return thinned([(moment, number) for number, moment in enumerate(done, 1)])
