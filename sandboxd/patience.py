"""Rides over the restart of a daemon: calls that may be repeated wait for the next one, for so long."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from sandboxd import keepalive
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.errors import Draining
from sandboxd.status import from_rpc_error, made_by_daemon, translated

PAUSE_SECONDS, PAUSE_LIMIT_SECONDS = 0.05, 0.5

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    # A daemon that was restarted is found soon: gRPC's own pauses grow to two minutes. The least of them is,
    # against its name, how long a connection may take: a daemon that is busy is there.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
    *keepalive.of_client(),
]


@dataclass(slots=True)
class _Absence:
    """Of the daemon, as one call meets it: from its first failure on, for `seconds`."""

    clock: Clock
    seconds: float
    since: float

    @property
    def left(self) -> float:
        return self.since + self.seconds - self.clock.now()


def _never() -> bool:
    return False


class Patience:
    """Of one client: `seconds` that a daemon which was there before may be away."""

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self._clock = clock or MonotonicClock()
        self._met = False

    async def call(
        self,
        make: Callable[[], Awaitable[Any]],
        *,
        at_most: float = math.inf,
        answered: Callable[[], bool] = _never,
    ) -> Any:
        """The reply to the call that `make` makes, repeated while the daemon is away.

        The time, `seconds` or `at_most` where that is less, counts from the moment at which the first attempt
        failed. Until it has passed attempts are made, at once and then after pauses; the last one begins when
        it has just passed, and none where it is 0. No attempt is cut short. `answered` is asked about each
        attempt that failed: where it had heard from a daemon, its failure is a first one again, for another
        daemon went away. A daemon that was never there is not waited for. Raises what the daemon raised.
        """
        with translated():
            try:
                reply: Any = await make()
            except grpc.aio.AioRpcError as error:
                absence = _Absence(self._clock, min(self.seconds, at_most), self._clock.now())
                if not self._met or not is_away(error) or absence.left <= 0:
                    raise
                answered()
                reply = await self._again(make, absence, answered)
        self._met = True
        return reply

    async def _again(
        self, make: Callable[[], Awaitable[Any]], absence: _Absence, answered: Callable[[], bool]
    ) -> Any:
        async def attempt() -> Any:
            try:
                return await make()
            except grpc.aio.AioRpcError:
                if answered():
                    absence.since = self._clock.now()
                raise

        drawn = wait_random_exponential(multiplier=PAUSE_SECONDS, max=PAUSE_LIMIT_SECONDS)

        def pause(state: RetryCallState) -> float:
            # No longer than what is left: then comes the last attempt.
            return max(0.0, min(drawn(state), absence.left))

        retrying = AsyncRetrying(
            sleep=self._clock.sleep,
            retry=retry_if_exception(is_away),
            stop=lambda _: absence.left <= 0,
            wait=pause,
            reraise=True,
        )
        return await retrying(attempt)


def is_away(error: BaseException) -> bool:
    """True when no daemon answered, or one that is about to end: the next one may do better."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return not made_by_daemon(error) or isinstance(from_rpc_error(error), Draining)
