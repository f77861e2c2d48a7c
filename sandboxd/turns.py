"""Waiting for starting slots: for the forks of a pool, which pass its queue but not its host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from sandboxd.clock import Clock
from sandboxd.pacing import Bucket
from sandboxd.slots import Slots


class Turns:
    """First come, first served, never more than `at_once` says; `bucket` says how fast they may follow."""

    def __init__(self, slots: Slots, bucket: Bucket, clock: Clock, at_once: Callable[[], int]) -> None:
        self.pace = slots.pace
        self._share = slots.share(self._wake)
        self._bucket = bucket
        self._clock = clock
        self._at_once = at_once
        self._taken = self._queued = 0
        # Who is next: the others wait for this lock, in their order.
        self._next = asyncio.Lock()
        self._turn: asyncio.Future[None] | None = None

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Holds a slot for the block, once there is one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queued += 1
        try:
            async with self._next:
                # The token first: until it is there others may use the slot. And only who is next takes one,
                # or many forks would keep the pool's own starts waiting.
                if pause := self._bucket.take(self._clock.now()):
                    self._tell()
                    await self._clock.sleep(pause)
                self._turn = turn
                self._serve()
                await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._taken -= 1
            else:
                self._queued -= 1
                self._turn = None if self._turn is turn else self._turn
            self._serve()

    def leave(self) -> None:
        """Nobody comes any more."""
        self._share.leave()

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._tell()
        turn = self._turn
        if turn is None or turn.done() or self._taken >= self._at_once() or not self._share.room:
            return
        self._turn = None
        self._queued -= 1
        self._taken += 1
        turn.set_result(None)
        self._tell()

    def _tell(self) -> None:
        """Those without a token want no slot yet."""
        left = self._bucket.available(self._clock.now())
        ready = self._queued if left is None else left + (self._turn is not None)
        wants = min(self._queued, self._at_once() - self._taken, ready)
        self._share.hold(self._taken, wants=max(0, wants))
