"""Who may start how many sandboxes now, where several pools share what one host can start at once.

Pure. One limit for each backend, not for each pool: the starts of all its pools meet on the same processors
and in the same Engine, and two limits that each believe the host to be theirs would push one another down.
Backends have one each, for what is best for one is not for another.

Whoever wants more than an equal part is given what others leave. Where there are more that want something
than slots, they take turns: who was served longest ago goes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from sandboxd.pacing import Pace


class Slots:
    """The starting slots of one backend, as many as its pace allows."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._shares: list[Share] = []
        self._order = itertools.count(1)

    @property
    def free(self) -> int:
        """Slots that nobody holds; negative after the limit was lowered below what is under way."""
        return self.pace.free(sum(share.taken for share in self._shares))

    def share(self, wake: Callable[[], None]) -> Share:
        """The part of one more that starts sandboxes; `wake` is called when it may have more than before.

        `wake` must not ask for anything before it returns.
        """
        share = Share(self, wake)
        self._shares.append(share)
        return share

    def room(self, share: Share) -> int:
        """How many slots this one may take now."""
        free = self.free
        others = [other for other in self._shares if other is not share and other.wants]
        if free <= 0 or not others:
            return max(0, free)
        part = max(1, self.pace.limit // (len(others) + 1))
        owed = {other: min(other.wants, max(0, part - other.taken)) for other in others}
        first = sum(count for other, count in owed.items() if other.served < share.served)
        return max(0, free - sum(owed.values()), min(free - first, part - share.taken))

    def leave(self, share: Share) -> None:
        """It holds nothing and wants nothing any more, and is not woken."""
        share.hold(0, wants=0)
        if share in self._shares:
            self._shares.remove(share)

    def changed(self, share: Share, taken: int) -> None:
        """Notes who was served, and wakes those that may go on."""
        if taken > share.taken:
            share.served = next(self._order)
        share.taken = taken
        for other in self._shares:
            if other is not share and other.wants and self.room(other):
                other.wake()


class Share:
    """What one pool, or the forks of one, has of the slots: how many it holds, and how many more it wants."""

    def __init__(self, slots: Slots, wake: Callable[[], None]) -> None:
        self.taken = self.wants = self.served = 0
        self.wake = wake
        self._slots = slots

    @property
    def pace(self) -> Pace:
        return self._slots.pace

    @property
    def room(self) -> int:
        """How many it may take now."""
        return self._slots.room(self)

    def hold(self, taken: int, *, wants: int) -> None:
        """Says how many it holds now, and how many more it would take if it might."""
        self.wants = wants
        self._slots.changed(self, taken)

    def leave(self) -> None:
        """Whose share it was starts nothing any more."""
        self._slots.leave(self)
