"""A client in a process of its own that holds leases, to be killed: by the chaos of rollouts and by tests."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator

from sandboxd.client import Client
from sandboxd.errors import SandboxdError

ACQUIRE_SECONDS, HELD_SECONDS = 300.0, 3600.0


class Holder:
    """The process, as who started it sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.kill = process.kill

    async def held(self) -> int:
        """How many leases it has; returns once it has all that it can get."""
        if self._process.stdout is None:
            raise AssertionError("the holder was started with a pipe")
        return int(await asyncio.to_thread(self._process.stdout.readline))


@contextlib.asynccontextmanager
async def holder(address: str, pool: str, count: int, ttl: float) -> AsyncIterator[Holder]:
    """Begins to lease so many sandboxes for `ttl` seconds at a time; killed when the block ends."""
    arguments = (address, pool, str(count), str(ttl))
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-m", "sandboxd.bench.holder", *arguments], stdout=subprocess.PIPE
    )
    try:
        yield Holder(process)
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def _acquired(client: Client, pool: str, ttl: float) -> bool:
    try:
        await client.acquire(pool, ttl=ttl, timeout=ACQUIRE_SECONDS)
    except SandboxdError:
        return False
    return True


async def _hold(address: str, pool: str, count: int, ttl: float) -> None:
    async with Client(address) as client:
        held = await asyncio.gather(*(_acquired(client, pool, ttl) for _ in range(count)))
        sys.stdout.write(f"{sum(held)}\n")
        sys.stdout.flush()
        await asyncio.sleep(HELD_SECONDS)


if __name__ == "__main__":
    _address, _pool, _count, _ttl = sys.argv[1:]
    asyncio.run(_hold(_address, _pool, int(_count), float(_ttl)))
