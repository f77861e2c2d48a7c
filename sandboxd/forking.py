"""Sandboxes that begin where another is: the copies they share, who uses these, and starts all or none."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from sandboxd.backends.base import Backend, Connection
from sandboxd.clock import Clock
from sandboxd.errors import SandboxdError
from sandboxd.lifetime import cleaned_up
from sandboxd.sandbox import Sandbox
from sandboxd.starting import RetryPolicy, Starter, faults_fail_the_start
from sandboxd.turns import Turns
from sandboxd.types import Template

Insist = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[bool]]


class Forks:
    """Of one pool, with the turns that its forks take. A copy (`Backend.branch`) without users is in `unused`
    until `prune` has removed it.
    """

    def __init__(self, backend: Backend, retry: RetryPolicy, clock: Clock, turns: Turns) -> None:
        self.unused: set[str] = set()
        self._backend = backend
        self._retry = retry
        self._clock = clock
        self._turns = turns
        self._users: Counter[str] = Counter()
        self._pruning: asyncio.Task[None] | None = None

    async def branch(self, source: str, template: Template, users: int) -> Template:
        """Copies the files of `source`, made from `template`; returns the template of its forks, whose copy
        counts as used by so many until each of them is counted out. Raises what `Backend.branch` raises.
        """
        name = secrets.token_hex(8)
        with self.held(template):
            try:
                forks = await self._backend.branch(source, template, name)
            except BaseException:
                # The backend removes what it has copied by then, which may fail: so it is tried again.
                self.unused.add(name)
                raise
            for _ in range(users):
                self.count_in(forks)
        return forks

    async def start_all(
        self,
        source: str,
        template: Template,
        forks: Sequence[Sandbox],
        leaving: Collection[asyncio.Task[None]] = (),
    ) -> None:
        """Begins them with the files of `source`, once those that give way to them are gone. Raises what
        `branch` and `start` raise.
        """
        with faults_fail_the_start(f"forking {source}", known=SandboxdError):
            own = await self.branch(source, template, len(forks))
            for fork in forks:
                fork.template = own
            if leaving:
                await asyncio.wait(leaving)
            connections = await self.start(own, [fork.id for fork in forks])
        for fork, connection in zip(forks, connections, strict=True):
            fork.connection = connection

    async def start(self, template: Template, names: Sequence[str]) -> list[Connection]:
        """Starts a sandbox of each name. After an error or a cancellation no start is under way and no
        connection open, but what was started by then is there. Raises what `Starter.start` raises.
        """
        starter = Starter(self._backend, template, self._retry, self._clock, self._turns.pace)

        async def start(name: str) -> Connection:
            async with self._turns.one():
                return await starter.start(name, between=self._clock.sleep)

        starts = [asyncio.ensure_future(start(name)) for name in names]
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
            return [each.result() for each in starts]
        except BaseException:
            await _undone(starts)
            raise

    @contextlib.contextmanager
    def held(self, template: Template) -> Iterator[None]:
        """What a sandbox of this template began with stays meanwhile."""
        self.count_in(template)
        try:
            yield
        finally:
            self.count_out(template)

    def count_in(self, template: Template) -> None:
        """One user more of all that the template begins with."""
        self._users.update(template.branches)

    def count_out(self, template: Template) -> None:
        """One user less of all that the template begins with."""
        self._users.subtract(template.branches)
        for branch in template.branches:
            if not self._users[branch]:
                del self._users[branch]
                self.unused.add(branch)

    async def prune(self) -> None:
        """Removes the copies that nobody uses. Raises BackendUnavailable; what is left stays in `unused`."""
        for branch in list(self.unused):
            await self._backend.prune(branch)
            self.unused.discard(branch)

    def prune_unused(self, tasks: asyncio.TaskGroup, insist: Insist) -> None:
        """Begins to remove the copies that nobody uses; it ends when none is left or `insist` gives up."""

        async def prune() -> None:
            while self.unused and await insist("removing copies", self.prune):
                pass

        if self.unused and (self._pruning is None or self._pruning.done()):
            self._pruning = tasks.create_task(prune(), name="removing copies")


async def _undone(starts: Sequence[asyncio.Future[Connection]]) -> None:
    """Returns when none of them is under way any more and what they opened is closed.

    A cancellation meanwhile is raised at the end, and passed on to them: then they wait for no backend that
    hangs.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [start for start in starts if not start.done()]:
        for start in pending:
            start.cancel()
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    opened = [each.result() for each in starts if not each.cancelled() and each.exception() is None]
    await cleaned_up("closing the connections of forks", _closed(opened))
    if cancelled is not None:
        raise cancelled


async def _closed(connections: Sequence[Connection]) -> None:
    for connection in connections:
        await cleaned_up("closing the connection of a fork", connection.close())
