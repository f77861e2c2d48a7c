"""How fast a queue moves. Pure: the caller says what time it is."""

from __future__ import annotations

import math

# What happened this long ago counts 1/e of what happens now.
MEMORY_SECONDS = 60.0
# Less waiting than this says nothing: the first grants of a burst would be taken for the pool's speed.
LEAST_SECONDS = 1.0


class GrantRate:
    """Sandboxes granted per second of waiting: an exponentially weighted mean over the time when somebody
    waited. Grants that nobody waited for say nothing of how long a queue takes, so they do not count.
    """

    def __init__(self) -> None:
        self._granted = 0.0
        self._waited = 0.0
        self._waiting_since: float | None = None

    def observe(self, now: float, granted: int, *, waiting: bool) -> None:
        """At `now` (seconds) so many were granted, and from now on somebody waits or nobody does."""
        if self._waiting_since is not None:
            self._granted, self._waited = self._at(now)
            self._granted += granted
        self._waiting_since = now if waiting else None

    def per_second(self, now: float) -> float | None:
        """None where no grant was waited for yet, or nobody waited for a second in all."""
        granted, waited = self._at(now)
        return granted / waited if granted and waited >= LEAST_SECONDS else None

    def _at(self, now: float) -> tuple[float, float]:
        """Grants and seconds of waiting, both weighted, if nothing was granted since the last observation."""
        passed = 0.0 if self._waiting_since is None else now - self._waiting_since
        fade = math.exp(-passed / MEMORY_SECONDS)
        return self._granted * fade, self._waited * fade + MEMORY_SECONDS * (1 - fade)
