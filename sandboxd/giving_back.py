"""Gives back what a client leased, also where whoever leased it is cut off while it does so.

A caller that is cancelled takes its call with it, and a daemon that had not come to that call would count the
sandbox as leased until the lease runs out. So each is a task of the client, which waits for it at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sandboxd.clock import Clock, MonotonicClock
from sandboxd.errors import AcquireTimedOut, BackendUnavailable, SandboxdError
from sandboxd.lifetime import Tasks, first_of, settle, told_later
from sandboxd.patience import Patience
from sandboxd.v1 import sandbox_service_pb2 as pb

RELEASE_TIMEOUT_SECONDS = 5.0
# Between two attempts at a daemon that did not answer.
PAUSE_SECONDS = 1.0


class GivingBack:
    """Of one client. `method` is the call that releases; use it within `async with giving_back.run():`."""

    def __init__(
        self, method: Callable[..., Awaitable[Any]], patience: Patience, clock: Clock | None = None
    ) -> None:
        self._method = method
        self._patience = patience
        self._clock = clock or MonotonicClock()
        self._closing = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._withdrawn: set[str] = set()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """At the end of the block whatever is under way is tried once more at most."""
        try:
            async with Tasks() as self._tasks:
                try:
                    yield
                finally:
                    self._closing.set()
        finally:
            self._tasks = None

    def release(self, name: str, ttl: float) -> asyncio.Future[None]:
        """Begins to end the lease of a sandbox, by its resource name; `ttl` in seconds is how long the lease
        lasts by itself. The future has what came of the first attempt, a SandboxdError where it failed.
        """
        return self._begin(pb.ReleaseSandboxRequest(name=name), ttl)

    def withdraw(
        self, request: pb.AcquireSandboxRequest | pb.AcquireSandboxesRequest
    ) -> asyncio.Future[None]:
        """Begins to give back what a request was given or is about to be given; as `release`."""
        ttl = request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else self._patience.seconds
        self._withdrawn.add(request.request_id)
        given = pb.ReleaseSandboxRequest(pool=request.pool, request_id=request.request_id)
        return self._begin(given, ttl)

    def asked_again(self, request_id: str) -> None:
        """What this request is given from now on is wanted, whatever was withdrawn before."""
        self._withdrawn.discard(request_id)

    def _begin(self, request: pb.ReleaseSandboxRequest, seconds: float) -> asyncio.Future[None]:
        told: asyncio.Future[None] = told_later()
        if self._tasks is None:
            told.set_exception(BackendUnavailable("the client is closed, and with it its connection"))
            return told
        task = self._tasks.create_task(self._insist(request, seconds, told), name="giving back")
        task.add_done_callback(lambda _: settle(told))
        task.add_done_callback(lambda _: self._withdrawn.discard(request.request_id))
        return told

    async def _insist(
        self, request: pb.ReleaseSandboxRequest, seconds: float, told: asyncio.Future[None]
    ) -> None:
        """Tells the daemon, and tells it again for `seconds` while it does not answer: by then the lease has
        run out.
        """
        until = self._clock.now() + seconds
        while True:
            error = await self._attempt(request)
            if told.done():
                pass
            elif error is None:
                told.set_result(None)
            else:
                told.set_exception(error)
            unanswered = isinstance(error, BackendUnavailable | AcquireTimedOut)
            if not unanswered or self._closing.is_set() or self._clock.now() >= until:
                return
            await first_of(self._clock.sleep(PAUSE_SECONDS), self._closing.wait())
            if request.request_id and request.request_id not in self._withdrawn:
                return

    async def _attempt(self, request: pb.ReleaseSandboxRequest) -> SandboxdError | None:
        """What it failed with."""
        try:
            await self._patience.call(
                lambda: self._method(request, timeout=RELEASE_TIMEOUT_SECONDS),
                at_most=RELEASE_TIMEOUT_SECONDS,
            )
        except SandboxdError as error:
            return error
        return None


async def heard(told: asyncio.Future[None]) -> None:
    """Returns when the daemon has heard of a release, or could not be reached. Whoever is cancelled while he
    waits here leaves the release alone.
    """
    with contextlib.suppress(BackendUnavailable, AcquireTimedOut):
        await asyncio.shield(told)
