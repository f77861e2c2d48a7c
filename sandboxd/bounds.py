"""What a ledger is told and tells: what a pool may have, what to do now, what has happened. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Bounds:
    """What a pool may have: ready sandboxes, sandboxes in all, starts at once, callers in the queue.

    `weights` are the shares of the tenants; those that are not named have 1. Of what failed
    `quarantine_limit` are kept.
    """

    warm_target: int
    size_limit: int
    start_limit: int
    waiting_limit: int
    weights: Mapping[str, int] = field(default_factory=dict)
    quarantine_limit: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now; the ledger counts all of it as done. A ticket is granted all that it wants at once.

    `held_back` is how many more starts there would be with more room; `evict` are to be destroyed.
    """

    start: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    grant: tuple[tuple[int, tuple[str, ...]], ...] = ()
    held_back: int = 0
    evict: tuple[str, ...] = ()


@dataclass(slots=True)
class Totals:
    """What has happened since the ledger was made. `unhealthy` are warm ones that died or did not answer."""

    acquired: int = 0
    released: int = 0
    expired: int = 0
    lost: int = 0
    started: int = 0
    start_failures: int = 0
    unhealthy: int = 0
    reused: int = 0
