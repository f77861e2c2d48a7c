"""A pool in this process, in whatever time its clock tells: for simulations of what leases sandboxes.

The pool is the daemon's own, with its queue, its sizing, its limit on starts and its retries. Its backend is
the fake one, with scripted starts and commands, so that nothing runs on the host. There is no gRPC between.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sandboxd.backends.fake import FakeBackend, FakeScript
from sandboxd.backends.faults import Fault, FaultyBackend
from sandboxd.backends.scripted import Answer
from sandboxd.bounds import Bounds
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.errors import FileNotFound, Internal
from sandboxd.leases import Lease
from sandboxd.pool import Pool, PoolOptions
from sandboxd.queueing import Claim
from sandboxd.regulator import Regulation
from sandboxd.replies import ExecResult, Gathered
from sandboxd.types import Command, PoolStats, Template

__all__ = ["LoopClock", "Simulated", "SimulatedBox", "SimulatedPool", "simulated_pool"]


class LoopClock(MonotonicClock):
    """The time of the running event loop, which may be virtual."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated pool. In seconds: how long a start and a command take.

    `warm` sandboxes are kept ready, up to `size` when demand is high; `size` may exist and `starts` be
    starting at once. `faults` are written as in `sandboxd.backends.faults` and drawn from `seed`.
    """

    warm: int = 8
    size: int = 64
    starts: int = 32
    start_seconds: float = 0.0
    command_seconds: float = 0.0
    output: bytes = b"ok\n"
    faults: tuple[str, ...] = ()
    seed: int = 0


class SimulatedBox:
    """A leased sandbox of a simulated pool. Every call raises SandboxdError; there are no files."""

    def __init__(self, pool: Pool, sandbox_id: str) -> None:
        self._pool = pool
        self._id = sandbox_id

    async def exec(self, argv: Sequence[str], *, timeout: float, output_limit: int) -> ExecResult:
        """Takes the scripted time and gives the scripted output."""
        words = tuple(os.fsencode(word) for word in argv)
        command = Command(words, timeout=timeout, output_limit=output_limit)
        gathered = Gathered()
        async with self._pool.connection(self._id).exec(command) as execution:
            async for event in execution:
                gathered.add(event)
        if gathered.result is None:
            raise Internal(f"a command of sandbox {self._id!r} ended without saying how")
        return gathered.result

    async def read_file(self, path: str) -> bytes:
        """Raises FileNotFound."""
        raise FileNotFound(f"there is no file {path!r}: simulated sandboxes hold none")

    async def write_file(self, path: str, data: bytes) -> int:
        """Drops it; returns its size in bytes."""
        return len(data)


class SimulatedPool:
    """Leases from a simulated pool. `timeout` in seconds bounds the wait for one."""

    def __init__(self, pool: Pool, timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[SimulatedBox]:
        """A sandbox for the length of the block. Raises as the daemon's AcquireSandbox does."""
        sandbox = await self._pool.acquire(Lease(), Claim(), timeout=self._timeout)
        try:
            yield SimulatedBox(self._pool, sandbox.id)
        finally:
            self._pool.release(sandbox.id)

    def stats(self) -> PoolStats:
        """Counts and totals at this moment."""
        return self._pool.stats()

    def check(self) -> None:
        """Raises AssertionError where the pool's books do not close."""
        self._pool.check()


@asynccontextmanager
async def simulated_pool(
    shape: Simulated, clock: Clock | None = None, *, ttl: float = 3600.0, timeout: float = 600.0
) -> AsyncIterator[SimulatedPool]:
    """A pool for the length of the block; leases of `ttl` seconds, of which none is renewed."""
    clock = clock or LoopClock()
    answer = Answer(shape.command_seconds, shape.output)
    script = FakeScript(start_seconds=shape.start_seconds, answer=lambda _: answer)
    backend = FaultyBackend(
        FakeBackend(script, clock=clock),
        [Fault.parse(fault) for fault in shape.faults],
        seed=shape.seed,
        clock=clock,
    )
    options = PoolOptions(
        Bounds(shape.warm, shape.size, shape.starts, waiting_limit=100_000),
        default_ttl=ttl,
        regulation=Regulation(warm_limit=shape.size),
    )
    pool = Pool("simulated", backend=backend, template=Template("simulated"), options=options, clock=clock)
    async with pool.run():
        yield SimulatedPool(pool, timeout)
