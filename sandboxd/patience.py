"""Rides over the restart of a daemon: calls that may be repeated wait for the next one, for so long."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from sandboxd.errors import Draining
from sandboxd.status import from_rpc_error, made_by_daemon, translated

PAUSE_SECONDS, PAUSE_LIMIT_SECONDS = 0.05, 0.5


class Patience:
    """Of one client: `seconds` that a daemon which was there before may be away."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._met = False

    async def call(self, make: Callable[[], Awaitable[Any]], *, at_most: float = math.inf) -> Any:
        """The reply to the call that `make` makes, repeated while the daemon is away, `at_most` for so long.

        One that was never there is not waited for. Raises what the daemon raised.
        """
        with translated():
            try:
                reply: Any = await make()
            except grpc.aio.AioRpcError as error:
                if not self._met or not is_away(error):
                    raise
                reply = await self._again(make, min(self.seconds, at_most))
        self._met = True
        return reply

    async def _again(self, make: Callable[[], Awaitable[Any]], seconds: float) -> Any:
        retrying = AsyncRetrying(
            retry=retry_if_exception(is_away),
            stop=stop_after_delay(seconds),
            wait=wait_random_exponential(multiplier=PAUSE_SECONDS, max=PAUSE_LIMIT_SECONDS),
            reraise=True,
        )

        async def attempt() -> Any:
            return await make()

        return await retrying(attempt)


def is_away(error: BaseException) -> bool:
    """True when no daemon answered, or one that is about to end: the next one may do better."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return not made_by_daemon(error) or isinstance(from_rpc_error(error), Draining)
