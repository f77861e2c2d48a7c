"""How long starts take and how many succeed in a second. Pure: the caller says what time it is."""

from __future__ import annotations

import statistics
from collections import deque

SAMPLES = 256
# The rate is of so many of the last seconds.
RATE_SECONDS = 10.0


class StartTimes:
    """Of the sandboxes of one pool. All times are in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=SAMPLES)
        self._ends: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, now: float, seconds: float) -> None:
        """A start that took so long has succeeded."""
        self._seconds.append(seconds)
        self._ends.append(now)

    def median(self) -> float | None:
        """None before the first."""
        return statistics.median(self._seconds) if self._seconds else None

    def per_second(self, now: float) -> float:
        """Starts that succeeded in each of the last seconds, on average.

        Where more succeeded than are remembered, over the time that those took.
        """
        recent = sum(now - end < RATE_SECONDS for end in self._ends)
        if recent < SAMPLES:
            return recent / RATE_SECONDS
        return recent / max(now - self._ends[0], 1e-3)
