"""Python's full garbage collections, at quiet moments: each looks through all that lives, 20 to 50 ms with a
thousand leases, in which nothing is answered; left to itself Python begins one amid a thousand calls.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from sandboxd.clock import Clock

# A look for a quiet moment, and how many of them without one are the most.
LOOK_SECONDS, LOOKS = 5.0, 24
# So many collections of younger objects since the last full one are a reason for one; Python's own number.
YOUNGER = 10
NEVER = 1 << 30


@contextlib.contextmanager
def on_demand() -> Iterator[None]:
    """Within the block none is full but those that are asked for, and none looks through what lives at its
    begin, which stays for good.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _younger() -> int:
    """0 where Python sees to it."""
    return gc.get_count()[2] if gc.get_threshold()[2] == NEVER else 0


async def collect_when_quiet(
    clock: Clock,
    is_quiet: Callable[[], bool],
    collect: Callable[[], object] = gc.collect,
    younger: Callable[[], int] = _younger,
) -> None:
    """Collects when there is a reason and `is_quiet`, or has not been for two minutes. Never returns.

    `younger` is how many collections of younger objects there were since the last full one.
    """
    looks = 0
    while True:
        await clock.sleep(LOOK_SECONDS)
        if younger() < YOUNGER:
            looks = 0
            continue
        looks += 1
        if is_quiet() or looks >= LOOKS:
            collect()
            looks = 0
