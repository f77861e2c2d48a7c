"""What the daemon's tests share: an event loop for each, a clock that stands still, a daemon on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends.fake import FakeBackend, FakeScript
from sandboxd.backends.faults import Fault, FaultyBackend
from sandboxd.care import Care
from sandboxd.client import Client
from sandboxd.clock import ManualClock
from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.starting import RetryPolicy
from sandboxd.types import Template
from tests.sandboxd import guest_kit, namespace_kit
from tests.sandboxd.backend_kit import box, busybox_store, case, unopened  # noqa: F401 - fixtures of the backends' tests

backend = namespace_kit.backend
sanitized = guest_kit.sanitized


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# For tests whose clock runs ahead while a thread works: how far, nobody can say.
LASTING = Lease(ttl=1e9)


async def settle() -> None:
    """Lets every task run until all of them wait for something that only the test can give."""
    for _ in range(50):
        await asyncio.sleep(0)


class Rig:
    """A pool on the fake backend with a clock that the test moves."""

    def __init__(self, pool: Pool, faulty: FaultyBackend, backend: FakeBackend, clock: ManualClock) -> None:
        self.pool, self.faulty, self.backend, self.clock = pool, faulty, backend, clock

    async def until(self, there: Callable[[], bool]) -> None:
        """Lets every task run until something is so: what other threads do takes as long as it takes."""
        async with asyncio.timeout(30):
            while not there():
                await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        await settle()
        self.clock.advance(seconds)
        await settle()

    @property
    def counts(self) -> str:
        """What the pool holds, as a person would say it."""
        return repr(self.pool).partition("Ledger ")[2].rstrip(">")


@pytest.fixture
def rig(clock: ManualClock) -> Callable[..., Any]:
    """`async with rig(warm=2, …) as r:` a running pool."""

    @contextlib.asynccontextmanager
    async def open_rig(
        *,
        warm: int = 0,
        size: int = 100,
        starts: int = 100,
        waiting: int = 100,
        script: FakeScript | None = None,
        faults: Sequence[str] = (),
        retry: RetryPolicy | None = None,
        template: Template | None = None,
        weights: dict[str, int] | None = None,
        care: Care | None = None,
        quarantine: int = 0,
    ) -> AsyncIterator[Rig]:
        backend = FakeBackend(script, clock=clock)
        faulty = FaultyBackend(backend, [Fault.parse(fault) for fault in faults], clock=clock)
        options = PoolOptions(
            Bounds(warm, size, starts, waiting, weights or {}, quarantine_limit=quarantine),
            default_ttl=60.0,
            retry=retry or RetryPolicy(),
            care=care or Care(),
        )
        pool = Pool("p", backend=faulty, template=template or Template("p"), options=options, clock=clock)
        async with pool.run():
            await settle()
            yield Rig(pool, faulty, backend, clock)
        assert await backend.list_ids() == []
        assert pool.sandboxes() == []

    return open_rig


@pytest.fixture
def daemon(tmp_path: Path) -> Callable[..., Any]:
    """`async with daemon(pools={…}) as client:` a real daemon behind a real socket, in this process."""

    @contextlib.asynccontextmanager
    async def open_daemon(**settings: Any) -> AsyncIterator[Client]:
        settings.setdefault("pools", {"python": {"backend": "fake", "warm": 2}})
        config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, **settings)
        async with running(config) as addresses, Client(addresses[0]) as client:
            yield client

    return open_daemon


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Processes that begin in this block write no file of more bytes, unless they ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def daemon_process(tmp_path: Path, settings: str) -> Iterator[str]:
    """The address of a daemon in a process of its own, which SIGTERM must end with 0."""
    config = tmp_path / "sandboxd.toml"
    config.write_text(settings)
    command = [sys.executable, "-m", "sandboxd", "serve", "--config", str(config)]
    process = subprocess.Popen([*command, "--state-dir", str(tmp_path / "state")], stdout=subprocess.PIPE)
    assert process.stdout
    try:
        line = process.stdout.readline().decode()
        yield line.split(" serving ")[1].split(";")[0]
    finally:
        process.terminate()
        process.stdout.close()
        ended = process.wait(30)
    assert ended == 0
