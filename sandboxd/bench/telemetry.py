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
    begun: float

    def spent(self) -> float:
        """Processor time in seconds since the first turn began."""
        return _processor_seconds(self.pid) - self.begun


@dataclass(frozen=True, slots=True)
class _Pair:
    """Seconds of processor time of the two daemons of a pair."""

    off: float
    on: float


async def run(options: Options) -> Result:
    """Measures on daemons of its own, two at a time: two that are alike may differ by some percent for as
    long as they live (where their memory lies, say): then one pair tells little, however long it runs.

    Raises BackendUnavailable when one cannot be started.
    """
    result = Result("telemetry", options.target.name, options.count * options.rounds * options.pairs)
    pairs: list[_Pair] = []
    # As of a rollout that is traced; the daemon that tells nothing is sent the same.
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer(__name__)
    async with _collector() as (address, sent):
        on = {"OTEL_SDK_DISABLED": "false", "OTEL_EXPORTER_OTLP_ENDPOINT": address}
        with tracer.start_as_current_span("bench"):
            for number in range(options.pairs):
                both = [("on", on), ("off", OFF)]
                pairs.append(await _pair(options, both[:: 1 if number % 2 else -1], result))
        result.more["telemetry"] = compared(
            [pair.off for pair in pairs], [pair.on for pair in pairs], options.count * options.rounds
        ) | {"bytes_sent": sum(sent)}
    return result


async def _pair(options: Options, both: list[tuple[str, dict[str, str]]], result: Result) -> _Pair:
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
        spent = {side.name: side.spent() for side in sides}
        for side in sides:
            await side.box.release()
    for after in left:
        result.host = after.host
        for what, count in after.leaked.items():
            result.leaked[what] = result.leaked.get(what, 0) + count
    return _Pair(**spent)


async def _side(name: str, opened: Session) -> _Side:
    box = await opened.acquire()
    for _ in range(WARM_UP_COMMANDS):
        await run_command(box)
    pid = await asyncio.to_thread(opened.daemon_pid)
    if pid is None:
        raise BackendUnavailable("the daemon's process cannot be told")
    return _Side(name, pid, box, 0.0)


async def _turn(side: _Side, count: int, result: Result) -> None:
    with noting_failures(result):
        for _ in range(count):
            began = time.perf_counter()
            await run_command(side.box)
            result.add(f"exec_{side.name}", time.perf_counter() - began)


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process, those that send included: clock_getcpuclockid(3), which Python lacks."""
    return time.clock_gettime(~pid << 3 | 2)


def compared(off: Sequence[float], on: Sequence[float], commands: int) -> dict[str, float]:
    """Microseconds of processor time a command, of the seconds that the daemons of each pair spent on so
    many. `share` is the mean of the pairs, with its interval of 95 % where there are two or more.
    """
    without = statistics.fmean(off) * 1e6 / commands
    more = statistics.fmean(b - a for a, b in zip(off, on, strict=True)) * 1e6 / commands
    shares = [b / a - 1 for a, b in zip(off, on, strict=True)]
    told = {"off_us": without, "more_us": more, "share": statistics.fmean(shares), "pairs": len(shares)}
    if len(shares) > 1:
        half = _student(len(shares) - 1) * statistics.stdev(shares) / math.sqrt(len(shares))
        told |= {"share_low": told["share"] - half, "share_high": told["share"] + half}
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
