"""Waiting for starting slots: for the forks of a pool, which pass its queue but not its host."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from sandboxd.clock import Clock
from sandboxd.pacing import Bucket
from sandboxd.slots import Slots


class Turns:
    """First come, first served, never more than `at_once`; `bucket` says how fast they may follow."""

    def __init__(self, slots: Slots, bucket: Bucket, clock: Clock, at_once: int) -> None:
        self.pace = slots.pace
        self._share = slots.share(self._wake)
        self._bucket = bucket
        self._clock = clock
        self._at_once = at_once
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Holds a slot for the block, once there is one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            self._serve()
            await turn
            if pause := self._bucket.take(self._clock.now()):
                await self._clock.sleep(pause)
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._taken -= 1
            elif turn in self._waiting:
                self._waiting.remove(turn)
            self._serve()

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._tell()
        while self._waiting and self._taken < self._at_once and self._share.room:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._taken += 1
            self._tell()

    def _tell(self) -> None:
        self._share.hold(self._taken, wants=min(len(self._waiting), self._at_once - self._taken))
