"""One place among several generators: its state, and the life of the generator that it has now."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from rl.generator import Generator, GeneratorDead

Result = TypeVar("Result")

Open = Callable[[], AbstractAsyncContextManager[Generator]]
"""Starts a generator for the length of a block; called again after each death."""


class State(enum.StrEnum):
    """What a replica may be given to do."""

    STARTING = "starting"
    READY = "ready"
    BEHIND = "behind"
    GONE = "gone"


class Life:
    """A generator from its start to its death. Calls to it go through `run`, and end with it."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        # Its message alone: an error keeps the frames that it passed through, and they the dead engine.
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls: set[asyncio.Future[Any]] = set()

    def end(self, why: str) -> None:
        """It died; heard of by each of its requests, of which the first counts."""
        if not self.death.done():
            self.death.set_result(why)

    async def run(self, call: Awaitable[Result]) -> Result:
        """What the call returns; GeneratorDead once the generator is dead, whatever the call waits for."""
        calling = asyncio.ensure_future(call)
        self._calls.add(calling)
        calling.add_done_callback(self._ended)
        try:
            await asyncio.wait((calling, self.death), return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise GeneratorDead(self.death.result())
        finally:
            calling.cancel()
            await asyncio.wait((calling,))

    def _ended(self, calling: asyncio.Future[Any]) -> None:
        self._calls.discard(calling)
        if not calling.cancelled():
            calling.exception()  # heard of: the death may have come first

    async def over(self) -> None:
        """Waits until no call is left, however often cancelled: a generator may not be closed under one."""
        cancelled = False
        while self._calls:
            try:
                await asyncio.wait(self._calls)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


class Replica:
    """One place for a generator. It has `running` requests, and had `ended`; `news`: it fell behind."""

    def __init__(self, number: int, open_: Open) -> None:
        self.number = number
        self.open = open_
        self.state = State.STARTING
        self.life: Life | None = None
        self.running = 0
        self.ended = 0
        self.failures = 0
        self.hung = False
        self.updating = 0
        self.last_death = "it did not start"
        self.news = asyncio.Event()

    def lose(self, life: Life, why: str) -> None:
        """The generator of this life died, or is given up."""
        life.end(why)
        if self.life is life:
            self.state = State.STARTING

    def fall_behind(self) -> None:
        self.state = State.BEHIND
        self.news.set()
