"""How long starts take and how many succeed in a second. Pure: the caller says what time it is."""

from __future__ import annotations

import bisect
from collections import deque

SAMPLES = 256
# The rate is of so many of the last seconds.
RATE_SECONDS = 10.0


class StartTimes:
    """Of the sandboxes of one pool. All times are in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=SAMPLES)
        # The same, sorted: every plan asks for the median.
        self._sorted: list[float] = []
        self._ends: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, now: float, seconds: float) -> None:
        """A start that took so long has succeeded."""
        if len(self._seconds) == SAMPLES:
            del self._sorted[bisect.bisect_left(self._sorted, self._seconds[0])]
        self._seconds.append(seconds)
        bisect.insort(self._sorted, seconds)
        self._ends.append(now)

    def median(self) -> float | None:
        """None before the first."""
        count = len(self._sorted)
        return (self._sorted[(count - 1) // 2] + self._sorted[count // 2]) / 2 if count else None

    def per_second(self, now: float) -> float:
        """Starts that succeeded in each of the last seconds, on average.

        Where more succeeded than are remembered, over the time that those took.
        """
        recent = sum(now - end < RATE_SECONDS for end in self._ends)
        if recent < SAMPLES:
            return recent / RATE_SECONDS
        return recent / max(now - self._ends[0], 1e-3)
