"""Teardowns that are tried until they are done: one that fails once must not leak."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sandboxd.availability import Availability
from sandboxd.clock import Clock
from sandboxd.errors import BackendUnavailable
from sandboxd.lifetime import first_of

logger = logging.getLogger(__name__)

# One that fails is tried again after a pause that doubles; meanwhile its sandbox counts as deleting.
PAUSE_SECONDS, PAUSE_LIMIT_SECONDS = 1.0, 30.0


async def insist(
    what: str,
    act: Callable[[], Awaitable[None]],
    clock: Clock,
    availability: Availability,
    closing: asyncio.Event,
) -> bool:
    """Tries until it is done, then True. At the end of the pool only once, for the backend's own `close`
    sweeps whatever is left of this instance; then False.

    While the backend is unavailable it waits, or gives up at the end of the pool.
    """
    pause = PAUSE_SECONDS
    while not (closing.is_set() and availability.error is not None):
        try:
            await act()
            return True
        except BackendUnavailable as error:
            logger.warning("%s: %s", what, error.message)
            availability.suspect()
        except Exception:
            logger.exception("%s", what)
        if closing.is_set():
            break
        await first_of(clock.sleep(pause), closing.wait())
        pause = min(2 * pause, PAUSE_LIMIT_SECONDS)
        await first_of(availability.back(), closing.wait())
    return False
