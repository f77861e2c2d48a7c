"""What a lease says, and when each ends. Pure: the caller says what time it is."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

# So many entries of no use are left where they are, however few leases there are.
SPARE_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class Lease:
    """What an acquirer asks for besides a sandbox."""

    ttl: float | None = None
    labels: dict[str, str] = field(default_factory=dict)
    request_id: str = ""


class LeaseTable:
    """Deadlines of the leased sandboxes, the next one first.

    Renewals and releases leave their old heap entry behind; it is skipped when it comes up, since the
    deadline in `_expiry` no longer matches. Behind one long lease they would gather for as long as it goes
    on: when most entries are such, the heap is made anew.
    """

    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._expiry)

    @property
    def entries(self) -> int:
        """How many are kept, those of no use among them."""
        return len(self._heap)

    def put(self, sandbox_id: str, expiry: float) -> None:
        """Grants or renews: the lease now ends at `expiry`."""
        self._expiry[sandbox_id] = expiry
        heapq.heappush(self._heap, (expiry, sandbox_id))
        if len(self._heap) > 2 * len(self._expiry) + SPARE_ENTRIES:
            self._heap = [(expiry, sandbox_id) for sandbox_id, expiry in self._expiry.items()]
            heapq.heapify(self._heap)

    def drop(self, sandbox_id: str) -> None:
        """Forgets the lease; unknown names are no error."""
        self._expiry.pop(sandbox_id, None)

    def expiry(self, sandbox_id: str) -> float | None:
        return self._expiry.get(sandbox_id)

    def next_expiry(self) -> float | None:
        """The earliest deadline, or None when nothing is leased."""
        while self._heap and self._expiry.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expire(self, now: float) -> list[str]:
        """Drops and returns the leases that have ended at `now`, earliest first."""
        ended: list[str] = []
        while (deadline := self.next_expiry()) is not None and deadline <= now:
            sandbox_id = heapq.heappop(self._heap)[1]
            del self._expiry[sandbox_id]
            ended.append(sandbox_id)
        return ended
