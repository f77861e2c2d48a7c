"""How soon a daemon's health service answers while others keep it busy.

Asked by a process of its own: in the bench's, a thousand callers would hold up the question itself. It waits
for nobody where it may, for its own waits for a processor are none of the daemon's. Asked by the clock,
whether the last answer has come or not: else a stall of a second would count as one slow answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sandboxd.bench.child_process import child_process
from sandboxd.bench.result import Result, quantiles
from sandboxd.priority import wait_for_no_other

INTERVAL_SECONDS = 0.02
TIMEOUT_SECONDS = 60.0


@contextlib.asynccontextmanager
async def asked_meanwhile(address: str, result: Result) -> AsyncIterator[None]:
    """While the block runs, the daemon is asked; `result` then has `health_s` and `health`."""
    async with child_process("sandboxd.bench.health", address, own_session=True) as process:
        if process.stdout is None:
            raise AssertionError("the asking process was started with a pipe")
        await asyncio.to_thread(process.stdout.readline)
        yield
        # The end of its input ends it.
        said, _ = await asyncio.to_thread(process.communicate)
        _note(json.loads(said), result)


def _note(heard: dict[str, Any], result: Result) -> None:
    seconds, failures = heard["seconds"], heard["failures"]
    result.more["health_s"] = quantiles(seconds)
    result.more["health"] = {
        "interval_s": INTERVAL_SECONDS,
        "asked": len(seconds) + len(failures),
        "failed": len(failures),
        # How late the asking process was run itself: what the host adds to every answer.
        "late_s": quantiles(heard["late"]),
    }
    result.failures += [f"health: {failure}" for failure in failures]


async def _ask(address: str) -> None:
    """Asks until standard input ends, then prints what was heard."""
    seconds: list[float] = []
    late: list[float] = []
    failures: list[str] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def check() -> None:
            began = time.perf_counter()
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                failures.append(f"{error.code().name}: {error.details()}")
                return
            seconds.append(time.perf_counter() - began)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                failures.append(f"status {answer.status}")

        # The first pays for the connection.
        await check()
        seconds.clear()
        _say("asking")
        over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        async with asyncio.TaskGroup() as tasks:
            due = time.monotonic()
            while not over.done():
                tasks.create_task(check())
                due += INTERVAL_SECONDS
                await asyncio.wait([over], timeout=max(0.0, due - time.monotonic()))
                late.append(max(0.0, time.monotonic() - due))
    _say(json.dumps({"seconds": seconds, "late": late, "failures": failures}))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    wait_for_no_other()
    asyncio.run(_ask(sys.argv[1]))
