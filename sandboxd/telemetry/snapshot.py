"""The pools' numbers, for threads: taken by the event loop, which alone may look at them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping

from sandboxd.types import PoolStats

logger = logging.getLogger(__name__)

# One collection asks for a dozen instruments; all of them are to tell the same moment.
FRESH_SECONDS = 0.25
# A loop that is busy for longer answers the next collection.
PATIENCE_SECONDS = 5.0

Numbers = Mapping[str, PoolStats]


class Snapshot:
    """`take` is called in `loop`. Calling this, from another thread, gives what it returned of late, or what
    is known where the loop does not answer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[], Numbers],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._take, self._clock = loop, take, clock
        self._lock = threading.Lock()
        self._known: Numbers = {}
        self._at = float("-inf")

    def __call__(self) -> Numbers:
        with self._lock:
            if self._clock() - self._at > FRESH_SECONDS:
                self._renew()
            return self._known

    def forget(self) -> None:
        """What is asked for next is of then."""
        with self._lock:
            self._at = float("-inf")

    def _renew(self) -> None:
        taken: concurrent.futures.Future[Numbers] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(lambda: taken.set_result(self._take()))
            self._known, self._at = taken.result(PATIENCE_SECONDS), self._clock()
        except (RuntimeError, TimeoutError) as error:
            logger.warning("the pools' numbers are old: %s", error or "the daemon is busy")
