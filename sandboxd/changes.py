"""Tells that something has changed, to whoever watches and at the pace of each: no backlog, no polling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from sandboxd.clock import Clock
from sandboxd.lifetime import first_of


class Changes:
    """Of one thing. Any number of changes between two looks are one."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._watchers: set[asyncio.Event] = set()
        self._listeners: list[Callable[[], None]] = []

    def tell(self) -> None:
        """Something has changed."""
        for watcher in self._watchers:
            watcher.set()
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        """Nothing changes any more: whoever watches stops."""
        self.closed.set()
        self.tell()

    def reopen(self) -> None:
        """It changes again, after `close`."""
        self.closed.clear()

    def forward(self, listener: Callable[[], None]) -> None:
        """Has `listener` called at every change; it must not wait."""
        self._listeners.append(listener)

    def drop(self, listener: Callable[[], None]) -> None:
        """Calls `listener` no more, if it was called."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns when a change has made `holds` true: asked at each, and no task wakes before."""
        maybe = asyncio.Event()

        def look() -> None:
            if holds():
                maybe.set()

        self.forward(look)
        try:
            while not holds():
                maybe.clear()
                await maybe.wait()
        finally:
            self.drop(look)

    @contextlib.contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """An event that each change sets; whoever watches clears it before looking."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)


async def paced(changes: Changes, clock: Clock, interval: float, heartbeat: float) -> AsyncIterator[None]:
    """Yields when it is time to look: at once, then after each change, until nothing changes any more.

    At most once in `interval` seconds, and at least once in `heartbeat` seconds. Changes that come while the
    caller is busy with the last look are one.
    """
    with changes.watched() as changed:
        while not changes.closed.is_set():
            changed.clear()
            yield
            await first_of(changes.closed.wait(), clock.sleep(interval))
            await first_of(changed.wait(), clock.sleep(max(0.0, heartbeat - interval)))
