"""A semaphore whose number can be changed while it is held and waited for."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Permits:
    """`async with permits:` holds one of `limit`, first come, first served. A lower limit takes none away."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._turns: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._grant()

    @property
    def waiting(self) -> int:
        return len(self._turns)

    async def __aenter__(self) -> None:
        if self._held < self._limit and not self._turns:
            self._held += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._turns.remove(turn)
                self._grant()  # whoever came since has queued behind it, though a permit may be free
            else:  # granted in the moment that it was given up
                self._give_back()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._held -= 1
        self._grant()

    def _grant(self) -> None:
        granted = [turn for turn in self._turns if not turn.done()][: max(0, self._limit - self._held)]
        for turn in granted:
            self._turns.remove(turn)
            self._held += 1
            turn.set_result(None)
