"""What every shape needs: a daemon of its own with one pool, a client of it, and a look at what is left."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from asyncio_pool import AioPool

from sandboxd.acquisition import Acquisition
from sandboxd.bench import host
from sandboxd.bench.audit import Snapshot
from sandboxd.bench.result import Result
from sandboxd.child import child_daemon, toml_value
from sandboxd.client import Box, Client
from sandboxd.errors import BackendUnavailable, SandboxdError
from sandboxd.replies import ExecResult

POOL = "bench"
ACQUIRE_TIMEOUT_SECONDS = 600.0
COMMAND = ["/bin/true"]
COMMAND_TIMEOUT_SECONDS = 60.0
# As rollouts bound what a model is shown.
COMMAND_OUTPUT_BYTES = 16 << 10
FILL_PAUSE_SECONDS = 0.05

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pool to measure; `start_limit` None leaves it to be found out. `size` bounds sandboxes and waiters;
    `limits` are those of each sandbox that differ from the default.
    """

    backend: str
    image: str | None
    size: int
    warm: int = 0
    start_limit: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)

    def settings(self) -> str:
        """The daemon's settings file."""
        lines = [
            f"[pools.{POOL}]",
            f"backend = {toml_value(self.backend)}",
            f"warm = {self.warm}",
            f"size_limit = {2 * self.size + 64}",
            f"waiting_limit = {self.size}",
            "ttl_seconds = 3600",
            "retry.attempts = 1",
            # A start waits for nothing but the host; what is slow must show as slow, not as failed.
            f"start_timeout_seconds = {ACQUIRE_TIMEOUT_SECONDS}",
        ]
        if self.image:
            lines.append(f"image = {toml_value(self.image)}")
        if self.start_limit:
            lines += [f"start_limit = {self.start_limit}", f"start_limit_min = {self.start_limit}"]
        lines += [f"limits.{name} = {value}" for name, value in self.limits.items()]
        return "\n".join(lines) + "\n"


@contextlib.asynccontextmanager
async def own_daemon(
    options: PoolOptions, result: Result, variables: Mapping[str, str] | None = None
) -> AsyncIterator[Client]:
    """A client of a daemon whose pool has been filled; afterwards `result` says what the daemon left.

    `variables` are set in its environment. Raises BackendUnavailable when the daemon cannot be started or the
    pool not be filled.
    """
    with tempfile.TemporaryDirectory(prefix="sandboxd-bench-") as directory:
        state = Path(directory) / "state"
        config = Path(directory) / "bench.toml"
        await asyncio.to_thread(config.write_text, options.settings())
        result.host = host.facts()
        before = Snapshot.take(state)
        log = Path(directory) / "daemon.log"
        daemon = child_daemon(state, config=config, log=log, variables=variables)
        async with daemon as address, Client(address) as client:
            await _filled(client, options.warm)
            yield client
        result.leaked = Snapshot.take(state).since(before)


async def _filled(client: Client, warm: int) -> None:
    deadline = time.monotonic() + ACQUIRE_TIMEOUT_SECONDS
    while (stats := await client.get_pool(POOL)).warm < warm:
        if stats.last_failure or time.monotonic() > deadline:
            why = stats.last_failure or f"{stats.warm} of {warm} after {ACQUIRE_TIMEOUT_SECONDS:g} s"
            raise BackendUnavailable(f"the pool cannot be filled: {why}")
        await asyncio.sleep(FILL_PAUSE_SECONDS)


def acquire(client: Client) -> Acquisition[Box]:
    """A sandbox of the pool, however long it takes."""
    return client.acquire(POOL, timeout=ACQUIRE_TIMEOUT_SECONDS)


async def run_command(box: Box) -> ExecResult:
    """The command that every shape times."""
    return await box.exec(COMMAND, timeout=COMMAND_TIMEOUT_SECONDS, output_limit=COMMAND_OUTPUT_BYTES)


@contextlib.contextmanager
def noting_failures(result: Result, when: str = "") -> Iterator[None]:
    """Enters what the daemon refuses or loses as a failure; `when` says in which part of the measurement."""
    try:
        yield
    except SandboxdError as error:
        result.failures.append(f"{when}{error.reason}: {error}")


async def all_at_once(items: Iterable[Item], act: Callable[[Item], Awaitable[None]]) -> None:
    """Starts `act` on every item before it waits for any."""
    items = list(items)
    async with AioPool(size=max(1, len(items))) as pool:
        for item in items:
            pool.spawn_n(act(item))
