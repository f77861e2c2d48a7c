"""Leases sandboxes for rollouts from a daemon, a run's own if need be; remembers how long each lease took."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

from rl.config import SandboxesConfig
from sandboxd import Client, PoolStats
from sandboxd.child import child_daemon
from sandboxd.client import Box


class DaemonSandboxes:
    """The `Sandboxes` of a rollout. `ttl` and `timeout` in seconds: the lease, and the wait for it."""

    def __init__(
        self,
        client: Client,
        pool: str,
        *,
        ttl: float,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._pool = pool
        self._ttl = ttl
        self._timeout = timeout
        self._clock = clock
        self._waits: list[float] = []

    @classmethod
    def of(cls, client: Client, wanted: SandboxesConfig) -> DaemonSandboxes:
        """As the settings say."""
        return cls(client, wanted.pool, ttl=wanted.ttl_seconds, timeout=wanted.timeout_seconds)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Box]:
        began = self._clock()
        async with self._client.acquire(self._pool, ttl=self._ttl, timeout=self._timeout) as box:
            self._waits.append(self._clock() - began)
            yield box

    def drain_waits(self) -> list[float]:
        """Seconds from asking to having, of each lease since the last call."""
        waits, self._waits = self._waits, []
        return waits


async def leases_ended(client: Client, pool: str, *, within: float) -> PoolStats:
    """The pool's numbers when nothing is leased any more, or after `within` seconds.

    A release that a busy daemon did not hear in time leaves a lease that runs out by itself: until then it is
    neither released nor expired.
    """
    stats = await client.get_pool(pool)
    with suppress(TimeoutError):
        async with asyncio.timeout(within), aclosing(client.watch_pool(pool)) as watched:
            while stats.active:
                stats = await anext(watched)
    return stats


@asynccontextmanager
async def own_daemon(wanted: SandboxesConfig, directory: Path) -> AsyncIterator[str]:
    """A daemon for this run alone, with its files in `directory`; ends with the run, however the run ends."""
    lines = [f"[pools.{wanted.pool}]", f"backend = {json.dumps(wanted.backend)}", f"warm = {wanted.warm}"]
    lines += [f"image = {json.dumps(wanted.image)}"] if wanted.image else []
    state = (directory / "sandboxd").resolve()
    await asyncio.to_thread(state.mkdir, parents=True, exist_ok=True)
    settings = state / "config.toml"
    await asyncio.to_thread(settings.write_text, "\n".join(lines) + "\n")
    async with child_daemon(state, config=settings) as address:
        yield address
