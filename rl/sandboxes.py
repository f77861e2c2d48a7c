"""Leases sandboxes for rollouts from a running daemon, and remembers how long each lease took."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sandboxd import Client
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
