"""Room for forks, which wait for no lease to end: what nobody holds or waits for gives way to them. Pure."""

from __future__ import annotations

import itertools

from sandboxd.errors import PoolFull
from sandboxd.ledger import Ledger


def giving_way(ledger: Ledger, count: int) -> tuple[str, ...]:
    """Those that must end for so many forks to fit, beside those that are ending: the least ready first, and
    of the warm ones the newest. What the queue waits for does not give way. Raises PoolFull.
    """
    room = ledger.bounds.size_limit - ledger.size
    lacking = count - room
    if lacking <= 0:
        return ()
    idle = (
        *ledger.quarantined,
        *ledger.resumable,
        *ledger.backing_off,
        *ledger.starting,
        *ledger.resetting,
        *ledger.doubted,
        *reversed(ledger.warm),
    )
    spare = max(0, len(idle) + len(ledger.deleting) - ledger.waiting.sandboxes)
    if lacking > spare:
        raise _full(ledger, count, max(0, room + spare))
    return tuple(itertools.islice(idle, max(0, lacking - len(ledger.deleting))))


def _full(ledger: Ledger, count: int, room: int) -> PoolFull:
    held = len(ledger.active) + len(ledger.forking)
    waited = f", and callers wait for {ledger.waiting.sandboxes}" if ledger.waiting else ""
    return PoolFull(
        f"{count} forks do not fit: the pool may have {ledger.bounds.size_limit} sandboxes, {held}"
        f" {'is' if held == 1 else 'are'} leased{waited}; release some, or raise its size_limit",
        metadata={"room": str(room)},
    )
