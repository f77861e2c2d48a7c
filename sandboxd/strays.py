"""What a backend made behind our back while it was away: a start that was given up may be finished later."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sandboxd.availability import Availability
from sandboxd.backends.base import Backend
from sandboxd.clock import Clock
from sandboxd.errors import BackendUnavailable
from sandboxd.lifetime import faults_become, first_of

logger = logging.getLogger(__name__)

# A call that was given up may be worked off this long after the backend is back: then once more.
AGAIN_SECONDS = 60.0


async def sweep(
    backend: Backend, availability: Availability, known: Callable[[], set[str]], clock: Clock
) -> None:
    """Destroys, each time that the backend comes back, the sandboxes that no pool knows. Never returns."""
    with availability.changes.watched() as changed:
        while True:
            # Each change is the beginning of an outage or its end. One that comes from here on stays noted.
            await changed.wait()
            await availability.back()
            changed.clear()
            await _sweep_once(backend, known)
            swept = False
            while not swept and not changed.is_set():
                await first_of(changed.wait(), clock.sleep(AGAIN_SECONDS))
                swept = not changed.is_set() and await _sweep_once(backend, known)


async def _sweep_once(backend: Backend, known: Callable[[], set[str]]) -> bool:
    """False where that failed."""
    try:
        with faults_become(BackendUnavailable, f"sweeping {backend.name}", known=BackendUnavailable):
            there = await backend.list_ids()
            # Only now: what has been begun since is not in the list, and what is in it was begun before.
            strays = set(there) - known()
            for sandbox_id in sorted(strays):
                await backend.destroy(sandbox_id)
    except BackendUnavailable as error:
        logger.warning("the %s backend was not swept: %s", backend.name, error.message)
        return False
    if strays:
        logger.warning("the %s backend had %d sandboxes of nobody: destroyed", backend.name, len(strays))
    return True
