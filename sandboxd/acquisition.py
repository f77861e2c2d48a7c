"""What is being leased: awaited, or entered for the length of a block."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

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
    """What is left, in seconds, of a time that begins now."""
    deadline = None if timeout is None else time.monotonic() + timeout
    return lambda: None if deadline is None else max(0.0, deadline - time.monotonic())
