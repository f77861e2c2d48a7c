"""One line of waiters, in the order of arrival. Pure.

Any of them may leave at any time, and how much stands before one is known in O(log n): two Fenwick trees
(Fenwick 1994, "A new data structure for cumulative frequency tables") over the places of the line, one
that counts callers and one that counts the sandboxes they want.
"""

from __future__ import annotations

from collections import OrderedDict

SMALLEST = 16


class Line:
    """Tickets, each with the number of sandboxes it wants (at least 1)."""

    def __init__(self) -> None:
        self.sandboxes = 0
        """How many all of them want together."""
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._clear()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, ticket: int, count: int) -> None:
        """Puts a waiter at the end."""
        if self._used == self._size:
            # Every other time half of the places or more are of those that left, so this is O(log n) each.
            waiters = [(waiter, wanted) for waiter, (_, wanted) in self._places.items()]
            self._clear()
            for waiter, wanted in waiters:
                self._put(waiter, wanted)
        self._put(ticket, count)

    def remove(self, ticket: int) -> int:
        """Takes a waiter out, wherever it stands; returns how many it wanted."""
        place, count = self._places.pop(ticket)
        self._change(place, -1, -count)
        return count

    def first(self) -> int:
        """The ticket at the front. There must be one."""
        return next(iter(self._places))

    def last(self) -> int:
        """The ticket at the end. There must be one."""
        return next(reversed(self._places))

    def sandboxes_of(self, ticket: int) -> int:
        """How many this one wants."""
        return self._places[ticket][1]

    def before(self, ticket: int) -> tuple[int, int]:
        """How many callers stand before this one, and how many sandboxes they want."""
        return self._sums(self._places[ticket][0] - 1)

    def within(self, sandboxes: int) -> tuple[int, int]:
        """Those before whom fewer than `sandboxes` are wanted: how many callers, wanting how many."""
        if sandboxes <= 0:
            return 0, 0
        place, left, step = 0, sandboxes, self._size
        while step:
            if place + step <= self._size and self._wanted[place + step] < left:
                place += step
                left -= self._wanted[place]
            step //= 2
        return self._sums(min(place + 1, self._size))

    def _clear(self) -> None:
        self._size = SMALLEST
        while self._size < 2 * (len(self._places) + 1):
            self._size *= 2
        self._places.clear()
        self._callers = [0] * (self._size + 1)
        self._wanted = [0] * (self._size + 1)
        self._used = self.sandboxes = 0

    def _put(self, ticket: int, count: int) -> None:
        self._used += 1
        self._places[ticket] = (self._used, count)
        self._change(self._used, 1, count)

    def _change(self, place: int, callers: int, sandboxes: int) -> None:
        self.sandboxes += sandboxes
        while place <= self._size:
            self._callers[place] += callers
            self._wanted[place] += sandboxes
            place += place & -place

    def _sums(self, place: int) -> tuple[int, int]:
        callers = sandboxes = 0
        while place:
            callers += self._callers[place]
            sandboxes += self._wanted[place]
            place -= place & -place
        return callers, sandboxes
