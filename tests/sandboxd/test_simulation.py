"""A pool in virtual time: scripted starts and commands, faults, and books that close."""

from __future__ import annotations

import asyncio
import random

import pytest

from rl.bench.virtual import elapse, run_virtual
from sandboxd.errors import AcquireTimedOut, FileNotFound, SandboxLost, SandboxNotFound
from sandboxd.simulation import Simulated, SimulatedPool, simulated_pool
from sandboxd.types import ExitReason


def now() -> float:
    return asyncio.get_running_loop().time()


async def use(pool: SimulatedPool, hold: float = 0.0) -> float:
    """Leases one, runs a command; returns when the command had ended."""
    async with pool.acquire() as box:
        result = await box.exec(["python3", "-c", "1"], timeout=60.0, output_limit=1 << 10)
        assert (result.reason, result.stdout) == (ExitReason.EXITED, b"ok\n")
        done = now()
        await elapse(hold)
    return done


def test_starts_and_commands_take_their_scripted_time() -> None:
    async def body() -> None:
        shape = Simulated(warm=0, size=2, start_seconds=5.0, command_seconds=0.5)
        async with simulated_pool(shape) as pool:
            times = await asyncio.gather(*(use(pool) for _ in range(4)))
            assert sorted(times) == pytest.approx([5.5, 5.5, 11.0, 11.0])
            pool.check()
            assert pool.stats().acquired_total == pool.stats().released_total == 4

    run_virtual(body())


def test_a_warm_pool_gives_at_once() -> None:
    async def body() -> None:
        async with simulated_pool(Simulated(warm=4, start_seconds=5.0)) as pool:
            await elapse(6.0)
            assert await asyncio.gather(*(use(pool) for _ in range(4))) == pytest.approx([6.0] * 4)

    run_virtual(body())


def test_starts_that_fail_are_tried_again_and_cost_time_alone() -> None:
    """A tenth of the attempts fails; no caller hears of it, and none is served earlier for it."""

    def last(*faults: str) -> float:
        random.seed(0)  # the pauses between attempts
        return run_virtual(_serve(Simulated(warm=0, size=32, start_seconds=1.0, faults=faults, seed=1)))

    assert last("fail start 0.1") >= last() == pytest.approx(7.0)


async def _serve(shape: Simulated) -> float:
    """100 callers, each of which holds its sandbox for a second; when the last had run its command."""
    async with simulated_pool(shape) as pool:
        times = await asyncio.gather(*(use(pool, hold=1.0) for _ in range(100)))
        assert pool.stats().released_total == 100
        pool.check()
        return max(times)


def test_a_command_beyond_its_time_and_a_sandbox_that_dies_end_as_the_daemons_do() -> None:
    async def body() -> None:
        async with simulated_pool(Simulated(command_seconds=9.0)) as pool, pool.acquire() as box:
            result = await box.exec(["sleep", "9"], timeout=2.0, output_limit=1)
            assert (result.reason, now()) == (ExitReason.TIMED_OUT, 2.0)
            assert await box.write_file("a", b"123") == 3
            with pytest.raises(FileNotFound):
                await box.read_file("a")
        async with simulated_pool(Simulated(faults=("die 1",))) as pool:
            with pytest.raises(SandboxLost):
                await use(pool)
            assert pool.stats().lost_total + pool.stats().released_total == 1
        with pytest.raises(SandboxNotFound):
            await box.exec(["true"], timeout=1.0, output_limit=1)

    run_virtual(body())


def test_waiting_is_bounded_by_virtual_time() -> None:
    async def body() -> None:
        async with simulated_pool(Simulated(warm=0, size=1), timeout=30.0) as pool, pool.acquire():
            with pytest.raises(AcquireTimedOut):
                await use(pool)
            assert now() == pytest.approx(30.0)

    run_virtual(body())
