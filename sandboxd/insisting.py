"""Teardowns that are tried until they are done: one that fails once must not leak."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from sandboxd.clock import Clock

logger = logging.getLogger(__name__)

# One that fails is tried again after this pause; meanwhile its sandbox counts as deleting.
PAUSE_SECONDS = 1.0


async def insist(
    what: str, act: Callable[[], Awaitable[None]], clock: Clock, closing: Callable[[], bool]
) -> bool:
    """Tries until it is done, then True. At the end of the pool only once, for the backend's own `close`
    sweeps whatever is left of this instance; then False.
    """
    while True:
        try:
            await act()
            return True
        except Exception:
            logger.exception("%s; trying again in %.0f s", what, PAUSE_SECONDS)
            if closing():
                return False
            await clock.sleep(PAUSE_SECONDS)
