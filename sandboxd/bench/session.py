"""What every shape needs: a daemon with one pool to measure, a client of it, and a look at what is left."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from asyncio_pool import AioPool

from sandboxd.acquisition import Acquisition
from sandboxd.bench import host
from sandboxd.bench.audit import Snapshot
from sandboxd.bench.processes import serving_pid
from sandboxd.bench.result import Result
from sandboxd.child import child_daemon, toml_value
from sandboxd.client import Box, Client
from sandboxd.config import ConfigError
from sandboxd.errors import BackendUnavailable, SandboxdError
from sandboxd.replies import ExecResult
from sandboxd.scratch import scratch_directory
from sandboxd.types import PoolStats

POOL = "bench"
# As the settings allow.
POOL_MOST = 100_000
# What the bare Docker SDK is called beside the backends.
BARE = "docker-sdk"
ACQUIRE_TIMEOUT_SECONDS = 600.0
COMMAND = ["/bin/true"]
COMMAND_TIMEOUT_SECONDS = 60.0
# As rollouts bound what a model is shown.
COMMAND_OUTPUT_BYTES = 16 << 10
FILL_PAUSE_SECONDS = 0.05
# What was released is gone within so long.
GONE_SECONDS = 30.0

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to measure: a daemon of the bench's own, with sandboxes of this backend, image and runtime and
    with `faults` on purpose; or the pool `pool` of the daemon at `address`, as it is.
    """

    backend: str = "namespace"
    image: str | None = None
    runtime: str | None = None
    faults: tuple[str, ...] = ()
    fault_seed: int = 0
    address: str | None = None
    pool: str = POOL

    @property
    def name(self) -> str:
        """What results call it."""
        if self.address:
            return f"{self.pool} at {self.address}"
        return f"{self.backend}/{self.runtime}" if self.runtime else self.backend


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pool to measure. `size` callers may hold a sandbox at once, and so many wait unless `waiting` says
    otherwise; `warm` are ready before. `start_limit` None leaves it to be found out. `limits` are those of
    each sandbox that differ from the default. A daemon of the bench's own has at most `size_limit` sandboxes,
    twice `size` and some more where it is None.
    """

    size: int
    warm: int = 0
    start_limit: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    waiting: int | None = None
    size_limit: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment of a daemon of the bench's own."""

    def settings(self, target: Target) -> str:
        """The file of settings of a daemon with such a pool. Raises ConfigError."""
        if self.size > POOL_MOST:
            raise ConfigError(f"{self.size} sandboxes at once are more than a pool may have: {POOL_MOST}")
        lines = []
        if target.faults:
            lines = [f"faults = {toml_value(list(target.faults))}", f"fault_seed = {target.fault_seed}"]
        lines += [
            f"[pools.{POOL}]",
            f"backend = {toml_value(target.backend)}",
            f"warm = {self.warm}",
            f"size_limit = {self.size_limit or min(2 * self.size + 64, POOL_MOST)}",
            f"waiting_limit = {self.size if self.waiting is None else self.waiting}",
            "ttl_seconds = 3600",
        ]
        if not target.faults:
            # A start waits for nothing but the host; what is slow must show as slow, not as failed.
            lines.append(f"start_timeout_seconds = {ACQUIRE_TIMEOUT_SECONDS}")
        if target.image:
            lines.append(f"image = {toml_value(target.image)}")
        if target.runtime:
            lines.append(f"runtime = {toml_value(target.runtime)}")
        if self.start_limit:
            lines += [f"start_limit = {self.start_limit}", f"start_limit_min = {self.start_limit}"]
        lines += [f"limits.{name} = {value}" for name, value in self.limits.items()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Session:
    """A client of the daemon that is measured. Leases that it and its helpers take carry `label`."""

    client: Client
    pool: str
    label: str

    def acquire(self) -> Acquisition[Box]:
        """A sandbox of the pool, however long it takes."""
        return self.client.acquire(self.pool, timeout=ACQUIRE_TIMEOUT_SECONDS, labels={"bench": self.label})

    async def stats(self) -> PoolStats:
        return await self.client.get_pool(self.pool)

    def daemon_pid(self) -> int | None:
        """None where it cannot be told, on another host say."""
        return serving_pid(self.client.address)


@contextlib.asynccontextmanager
async def session(target: Target, options: PoolOptions, result: Result) -> AsyncIterator[Session]:
    """A daemon whose pool has been filled; afterwards `result` says what is left of the measurement.

    Raises BackendUnavailable when the daemon cannot be started or reached or the pool not be filled,
    ConfigError when a running daemon's pool is too small.
    """
    result.host = host.facts()
    opened = _running(target, options, result) if target.address else _own(target, options, result)
    async with opened as opened_session:
        yield opened_session


@contextlib.asynccontextmanager
async def _own(target: Target, options: PoolOptions, result: Result) -> AsyncIterator[Session]:
    with scratch_directory("sandboxd-bench-") as directory:
        state = directory / "state"
        config = directory / "bench.toml"
        await asyncio.to_thread(config.write_text, options.settings(target))
        before = Snapshot.take(state)
        log = directory / "daemon.log"
        daemon = child_daemon(state, config=config, log=log, variables=options.variables)
        async with daemon as address, Client(address) as client:
            opened = Session(client, POOL, uuid.uuid4().hex[:12])
            await _filled(opened, options.warm, patient=bool(target.faults))
            yield opened
        result.leaked = Snapshot.take(state).since(before)


@contextlib.asynccontextmanager
async def _running(target: Target, options: PoolOptions, result: Result) -> AsyncIterator[Session]:
    async with Client(target.address) as client:
        opened = Session(client, target.pool, uuid.uuid4().hex[:12])
        stats = await opened.stats()
        if options.size > stats.size_limit:
            raise ConfigError(
                f"pool {target.pool!r} may have {stats.size_limit} sandboxes, the load wants {options.size}"
                f" at once: ask for fewer, or `sandboxd pool set {target.pool} --size-limit {options.size}`"
            )
        raised = options.warm > stats.warm_target
        try:
            if raised:
                await client.update_pool(target.pool, warm=options.warm)
                await _filled(opened, options.warm)
            yield opened
        finally:
            try:
                if raised:
                    await client.update_pool(target.pool, warm=stats.warm_target)
            finally:
                result.leaked = {"leases": await _left(opened)}


async def _filled(opened: Session, warm: int, *, patient: bool = False) -> None:
    """With `patient`, a start that fails is only one that takes longer."""
    deadline = time.monotonic() + ACQUIRE_TIMEOUT_SECONDS
    while (stats := await opened.stats()).warm < warm:
        if (stats.last_failure and not patient) or time.monotonic() > deadline:
            why = stats.last_failure or f"{stats.warm} of {warm} after {ACQUIRE_TIMEOUT_SECONDS:g} s"
            raise BackendUnavailable(f"the pool cannot be filled: {why}")
        await asyncio.sleep(FILL_PAUSE_SECONDS)


async def _left(opened: Session) -> int:
    """How many sandboxes of this measurement there still are when they should all be gone."""
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        listed = [each async for each in opened.client.list_sandboxes(opened.pool)]
        ours = sum(each.labels.get("bench") == opened.label for each in listed)
        if not ours or time.monotonic() > deadline:
            return ours
        await asyncio.sleep(FILL_PAUSE_SECONDS)


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
