"""What telemetry costs a command: the processor time of a daemon that tells a collector and of one that does
not, in turns, by pairs of them. Shares of one run compare; times do not, for machines are shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.sdk.trace import TracerProvider

from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, Session, Target, noting_failures, run_command, session
from sandboxd.client import Box
from sandboxd.errors import BackendUnavailable

# Half of what is sent at once: so, on average, as much is sent in the measured time as arises in it.
WARM_UP_COMMANDS = 256
SIGNALS = {"trace": "TraceService", "metrics": "MetricsService", "logs": "LogsService"}
OFF = {"OTEL_SDK_DISABLED": "true"}


@dataclass(frozen=True, slots=True)
class Options:
    """`count` commands a turn, one after the other, `rounds` turns of each daemon, `pairs` of daemons."""

    target: Target
    count: int = 100
    rounds: int = 10
    pairs: int = 8


@dataclass(slots=True)
class _Side:
    """One of two daemons. Its processor time is that of all the turns, its own and the other's: what
    it puts off until the other has its turn is spent on its commands too.
    """

    name: str
    pid: int
    box: Box
    begun: float = 0.0
    spent: float = 0.0
    """Seconds of processor time from the first turn to the last."""
    waited: float = 0.0
    """Seconds until its commands were answered."""


async def run(options: Options) -> Result:
    """Measures on daemons of its own, two at a time: two that are alike may differ by some percent for as
    long as they live (where their memory lies, say): then one pair tells little, however long it runs.

    Raises BackendUnavailable when one cannot be started.
    """
    result = Result("telemetry", options.target.name, options.count * options.rounds * options.pairs)
    spent: list[dict[str, float]] = []
    waited: list[dict[str, float]] = []
    # As of a rollout that is traced; the daemon that tells nothing is sent the same.
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer(__name__)
    async with _collector() as (address, sent):
        on = {"OTEL_SDK_DISABLED": "false", "OTEL_EXPORTER_OTLP_ENDPOINT": address}
        with tracer.start_as_current_span("bench"):
            for number in range(options.pairs):
                both = [("on", on), ("off", OFF)]
                sides = await _pair(options, both[:: 1 if number % 2 else -1], result)
                spent.append({side.name: side.spent for side in sides})
                waited.append({side.name: side.waited for side in sides})
        commands = options.count * options.rounds
        result.more["telemetry"] = {
            **compared(*_columns(spent), commands),
            **slower(*_columns(waited), commands),
            "pairs": len(spent),
            "bytes_sent": sum(sent),
        }
    return result


def _columns(pairs: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    return [pair["off"] for pair in pairs], [pair["on"] for pair in pairs]


async def _pair(options: Options, both: list[tuple[str, dict[str, str]]], result: Result) -> list[_Side]:
    """By turns, in the order ABBA."""
    left = [Result("telemetry", result.backend, 0) for _ in both]
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for (name, variables), after in zip(both, left, strict=True):
            pool = PoolOptions(1, warm=1, variables=variables)
            opened = await stack.enter_async_context(session(options.target, pool, after))
            sides.append(await _side(name, opened))
        for side in sides:
            side.begun = _processor_seconds(side.pid)
        begin = time.perf_counter()
        for turn in range(options.rounds):
            for side in reversed(sides) if turn % 2 else sides:
                await _turn(side, options.count, result)
        result.wall += time.perf_counter() - begin
        for side in sides:
            side.spent = _processor_seconds(side.pid) - side.begun
        for side in sides:
            await side.box.release()
    for after in left:
        result.host = after.host
        for what, count in after.leaked.items():
            result.leaked[what] = result.leaked.get(what, 0) + count
    return sides


async def _side(name: str, opened: Session) -> _Side:
    box = await opened.acquire()
    for _ in range(WARM_UP_COMMANDS):
        await run_command(box)
    pid = await asyncio.to_thread(opened.daemon_pid)
    if pid is None:
        raise BackendUnavailable("the daemon's process cannot be told")
    return _Side(name, pid, box)


async def _turn(side: _Side, count: int, result: Result) -> None:
    with noting_failures(result):
        for _ in range(count):
            began = time.perf_counter()
            await run_command(side.box)
            took = time.perf_counter() - began
            side.waited += took
            result.add(f"exec_{side.name}", took)


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process, those that send included: clock_getcpuclockid(3), which Python lacks."""
    return time.clock_gettime(~pid << 3 | 2)


def compared(off: Sequence[float], on: Sequence[float], commands: int) -> dict[str, float]:
    """Microseconds of processor time a command, of the seconds that the daemons of each pair spent on so
    many. `share` is the mean of the pairs, with its interval of 95 % where there are two or more.
    """
    without = statistics.fmean(off) * 1e6 / commands
    more = statistics.fmean(b - a for a, b in zip(off, on, strict=True)) * 1e6 / commands
    return {
        "off_us": without,
        "more_us": more,
        **_mean("share", [b / a - 1 for a, b in zip(off, on, strict=True)]),
    }


def slower(off: Sequence[float], on: Sequence[float], commands: int) -> dict[str, float]:
    """Commands a second, one after the other, of the seconds that so many took in each pair; `slower` is the
    share that telemetry takes of that, as `compared`.
    """
    shares = [1 - a / b for a, b in zip(off, on, strict=True)]
    rates = {f"{name}_per_s": commands / statistics.fmean(each) for name, each in (("off", off), ("on", on))}
    return rates | _mean("slower", shares)


def _mean(name: str, shares: list[float]) -> dict[str, float]:
    told = {name: statistics.fmean(shares)}
    if len(shares) > 1:
        half = _student(len(shares) - 1) * statistics.stdev(shares) / math.sqrt(len(shares))
        told |= {f"{name}_low": told[name] - half, f"{name}_high": told[name] + half}
    return told


def _student(freedom: int) -> float:
    """The 97.5 % point of Student's t: Abramowitz and Stegun, 26.7.5."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / math.pow(freedom, power) for power, term in enumerate(terms, 1))


@contextlib.asynccontextmanager
async def _collector() -> AsyncIterator[tuple[str, list[int]]]:
    """Takes what is exported, and says where, and how many bytes came."""
    sent: list[int] = []

    async def export(request: bytes, _: object) -> bytes:
        sent.append(len(request))
        return b""

    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(export)
    for signal, service in SIGNALS.items():
        name = f"opentelemetry.proto.collector.{signal}.v1.{service}"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}", sent
    finally:
        await server.stop(None)
