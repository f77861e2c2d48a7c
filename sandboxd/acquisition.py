"""What is being leased: awaited, or entered for the length of a block."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from sandboxd.errors import InvalidRequest
from sandboxd.wire import LONGEST_SECONDS

Leased = TypeVar("Leased")


class Acquisition(Generic[Leased]):
    """A sandbox, or a gang of them, being leased: await it, or enter it to have it released at the end."""

    def __init__(
        self, lease: Callable[[], Coroutine[Any, Any, Leased]], release: Callable[[Leased], Awaitable[object]]
    ) -> None:
        self._lease, self._release = lease, release
        self._leased: Leased | None = None

    def __await__(self) -> Generator[Any, None, Leased]:
        return self._lease().__await__()

    async def __aenter__(self) -> Leased:
        self._leased = await self
        return self._leased

    async def __aexit__(self, *exception: object) -> None:
        if self._leased is not None:
            await self._release(self._leased)


def countdown(timeout: float | None) -> Callable[[], float | None]:
    """What is left, in seconds, of a time that begins now. Raises InvalidRequest where it is no number.

    What no deadline of gRPC's can say, infinity too, is as good as the longest that one can.
    """
    if timeout is not None and math.isnan(timeout):
        raise InvalidRequest("timeout = nan s is no number: leave it out for no limit")
    deadline = None if timeout is None else time.monotonic() + min(timeout, LONGEST_SECONDS)
    return lambda: None if deadline is None else max(0.0, deadline - time.monotonic())
