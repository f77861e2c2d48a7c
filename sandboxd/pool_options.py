"""What the settings say about one pool beside its template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sandboxd.care import Care
from sandboxd.ledger import Bounds
from sandboxd.regulator import Regulation
from sandboxd.starting import RetryPolicy


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a pool may have, its leases in seconds, its retries; `carried` cuts a size to the host."""

    bounds: Bounds
    default_ttl: float = 300.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    regulation: Regulation = field(default_factory=Regulation)
    care: Care = field(default_factory=Care)
    carried: Callable[[int], int] = int
