"""The last quarter of an hour of each pool, a point a second, so that a page opened later has curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sandboxd.overview import failed_total
from sandboxd.types import PoolStats

POINTS_KEPT = 900
INTERVAL_SECONDS = 1.0

Point = list[float | None]
"""Time in seconds since 1970; warm, starting, active, waiting; failures since the daemon began; the median
start in seconds and how long the one that waits longest has waited, None where neither is known."""


class History:
    """Bounded: `POINTS_KEPT` points of each pool that is served."""

    def __init__(self) -> None:
        self._points: dict[str, deque[Point]] = {}

    def add(self, when: float, pools: Mapping[str, PoolStats]) -> None:
        """One point of each pool; pools that are not named are forgotten."""
        for name in self._points.keys() - pools.keys():
            del self._points[name]
        for name, stats in pools.items():
            self._points.setdefault(name, deque(maxlen=POINTS_KEPT)).append(point(when, stats))

    def since(self, when: float) -> dict[str, list[Point]]:
        """The points that are later, the oldest first."""
        found = {name: _later(points, when) for name, points in self._points.items()}
        return {name: points for name, points in found.items() if points}


def _later(points: deque[Point], when: float) -> list[Point]:
    later: list[Point] = []
    for each in reversed(points):
        if each[0] is None or each[0] <= when:
            break
        later.append(each)
    return later[::-1]


def point(when: float, stats: PoolStats) -> Point:
    """See `Point`."""
    counts: Point = [stats.warm, stats.starting, stats.active, stats.waiting, failed_total(stats)]
    return [round(when, 3), *counts, stats.start_seconds, stats.oldest_wait_seconds]
