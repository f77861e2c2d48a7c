"""Sandboxes that begin where another is: started all or none, the copy they share removed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from sandboxd.backends.base import Backend, Connection
from sandboxd.clock import Clock
from sandboxd.lifetime import Tasks
from sandboxd.starting import RetryPolicy, Starter
from sandboxd.types import Template


class Forks:
    """Of one pool. A copy (`Backend.branch`) goes when the last sandbox that began with it has gone."""

    def __init__(self, backend: Backend, retry: RetryPolicy, clock: Clock) -> None:
        self._backend = backend
        self._retry = retry
        self._clock = clock
        self._users: Counter[str] = Counter()

    async def start(
        self, source: str, template: Template, names: Sequence[str], at_once: int
    ) -> tuple[Template, list[Connection]]:
        """Starts sandboxes with the files of `source`, made from `template`; returns their own template.

        Each of them counts as a user of it until `ended`. After an error or a cancellation nothing of them is
        left. Raises what `Backend.branch` and `Starter.start` raise.
        """
        async with self._held(template):
            forks = await self._backend.branch(source, template, secrets.token_hex(8))
            async with self._held(forks):
                connections = await self._start_all(forks, names, at_once)
                for _ in names:
                    self._users.update(forks.branches)
        return forks, connections

    async def ended(self, template: Template) -> None:
        """A sandbox that was started from it has gone. Raises BackendUnavailable."""
        for branch in template.branches:
            self._users[branch] -= 1
            if not self._users[branch]:
                del self._users[branch]
                await self._backend.prune(branch)

    @contextlib.asynccontextmanager
    async def _held(self, template: Template) -> AsyncIterator[None]:
        self._users.update(template.branches)
        try:
            yield
        finally:
            await asyncio.shield(self.ended(template))

    async def _start_all(self, template: Template, names: Sequence[str], at_once: int) -> list[Connection]:
        starter = Starter(self._backend, template, self._retry, self._clock)
        slots = asyncio.Semaphore(at_once)
        started: dict[str, Connection] = {}

        async def start(name: str) -> None:
            async with slots:
                started[name] = await starter.start(name, between=self._clock.sleep)

        starts = [asyncio.ensure_future(start(name)) for name in names]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await asyncio.shield(self._withdraw(starts, started))
            raise
        return [started[name] for name in names]

    async def _withdraw(self, starts: Sequence[asyncio.Future[None]], started: dict[str, Connection]) -> None:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        async with Tasks() as tasks:
            for name, connection in started.items():
                tasks.create_task(connection.close())
                tasks.create_task(self._backend.destroy(name))
