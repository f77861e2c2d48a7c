"""Bounds the work of one turn of the event loop. Many calls that come at once, or starts that end at once,
are else one turn, and whoever asks for health needs several turns for one answer.
"""

from __future__ import annotations

import asyncio
from collections import deque

# One passage stands for 0.1 to 0.4 ms of work.
PER_TURN = 8


class Gate:
    """Lets `per_turn` through in each turn of the event loop, first come, first served. Who finds room
    goes on at once.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counts = False

    async def passed(self) -> None:
        """Returns in a turn that has room for one more."""
        if not self._counts:
            self._counts = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._left = self._per_turn
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            # Else it has left.
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        self._counts = self._left < self._per_turn
        if self._counts:
            asyncio.get_running_loop().call_soon(self._next_turn)
