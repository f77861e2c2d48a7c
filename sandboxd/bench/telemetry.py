"""What telemetry costs a command: the processor time of a daemon that tells a collector and of one that does
not, in turns. Shares of one run compare; times do not, for machines are shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.sdk.trace import TracerProvider

from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, Session, Target, noting_failures, run_command, session
from sandboxd.client import Box
from sandboxd.errors import BackendUnavailable

WARM_UP_COMMANDS = 100
SIGNALS = {"trace": "TraceService", "metrics": "MetricsService", "logs": "LogsService"}
OFF = {"OTEL_SDK_DISABLED": "true"}


@dataclass(frozen=True, slots=True)
class Options:
    """`count` commands a turn, one after the other, `rounds` turns of each daemon."""

    target: Target
    count: int = 100
    rounds: int = 50


@dataclass(slots=True)
class _Side:
    """One of the two daemons; `spent` is its processor time of each turn, in seconds."""

    name: str
    pid: int
    box: Box
    spent: list[float] = field(default_factory=list)


async def run(options: Options) -> Result:
    """Measures on two daemons of its own. Raises BackendUnavailable when one cannot be started."""
    result = Result("telemetry", options.target.name, options.count * options.rounds)
    async with _collector() as (address, sent):
        on = {"OTEL_SDK_DISABLED": "false", "OTEL_EXPORTER_OTLP_ENDPOINT": address}
        pools = [PoolOptions(1, warm=1, variables=variables) for variables in (on, OFF)]
        both = [session(options.target, pool, result) for pool in pools]
        async with both[0] as told, both[1] as silent:
            sides = [await _side("off", silent), await _side("on", told)]
            begin = time.perf_counter()
            # As of a rollout that is traced; the daemon that tells nothing is sent the same.
            tracer = TracerProvider(shutdown_on_exit=False).get_tracer(__name__)
            with tracer.start_as_current_span("bench"):
                for turn in range(options.rounds):
                    for side in sides if turn % 2 else reversed(sides):
                        await _turn(side, options.count, result)
            result.wall = time.perf_counter() - begin
            for side in sides:
                await side.box.release()
    result.more["telemetry"] = _compared(options, *sides) | {"bytes_sent": sum(sent)}
    return result


async def _side(name: str, opened: Session) -> _Side:
    box = await opened.acquire()
    for _ in range(WARM_UP_COMMANDS):
        await run_command(box)
    pid = await asyncio.to_thread(opened.daemon_pid)
    if pid is None:
        raise BackendUnavailable("the daemon's process cannot be told")
    return _Side(name, pid, box)


async def _turn(side: _Side, count: int, result: Result) -> None:
    before = _processor_seconds(side.pid)
    with noting_failures(result):
        for _ in range(count):
            began = time.perf_counter()
            await run_command(side.box)
            result.add(f"exec_{side.name}", time.perf_counter() - began)
    side.spent.append(_processor_seconds(side.pid) - before)


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process, those that send included: clock_getcpuclockid(3), which Python lacks."""
    return time.clock_gettime(~pid << 3 | 2)


def _compared(options: Options, off: _Side, on: _Side) -> dict[str, float]:
    """Microseconds of processor time a command."""
    scale = 1e6 / options.count
    without = statistics.median(off.spent) * scale
    more = statistics.median(b - a for a, b in zip(off.spent, on.spent, strict=True)) * scale
    whole = (statistics.fmean(on.spent) - statistics.fmean(off.spent)) * scale
    return {"off_us": without, "more_us": more, "more_mean_us": whole, "share": more / without}


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
