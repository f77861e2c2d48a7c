"""The event loop of the launcher: file descriptors by epoll, timers by a heap, one thread."""

from __future__ import annotations

import heapq
import select
import time
from collections.abc import Callable

IN, OUT, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR

now = time.monotonic


class Timer:
    """A call to come; `cancel` takes it back."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Calls back what was asked for until `stop`. Hang-ups are reported even for an empty mask."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._running = True

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """Calls `callback(ready mask)` whenever `fd` is ready; replaces an earlier watch of it."""
        known = self._watched.get(fd)
        if known is None:
            self._epoll.register(fd, mask)
        elif known[0] != mask:
            self._epoll.modify(fd, mask)
        self._watched[fd] = (mask, callback)

    def unwatch(self, fd: int) -> None:
        """Idempotent; must come before the descriptor is closed."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        self._count += 1
        heapq.heappush(self._timers, (now() + seconds, self._count, timer))
        return timer

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            for fd, mask in self._epoll.poll(self._patience()):
                watched = self._watched.get(fd)
                if watched is not None:
                    watched[1](mask)
            self._fire()

    def close(self) -> None:
        self._epoll.close()

    def _patience(self) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - now())

    def _fire(self) -> None:
        while self._timers and self._timers[0][0] <= now():
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()
