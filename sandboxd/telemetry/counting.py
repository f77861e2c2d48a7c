"""Histograms of what happens a thousand times a second: a tenth of what the SDK's own cost for each value.

They are merged into what the SDK's meters give whenever that is collected.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData

# Seconds. Those that semantic conventions advise for durations, finer below, where commands are, and wider
# above, where callers wait.
FINE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
BOUNDS = (*FINE, 30.0, 60.0, 300.0)


class _Point:
    __slots__ = ("buckets", "greatest", "least", "sum")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0
        self.least, self.greatest = float("inf"), 0.0


class Histogram:
    """Of seconds, for each combination of the values of `keys`. One thread adds; any may read."""

    def __init__(self, name: str, description: str, keys: Sequence[str]) -> None:
        self.name, self.description, self._keys = name, description, tuple(keys)
        self._points: dict[tuple[str, ...], _Point] = {}
        self._begun = time.time_ns()

    def add(self, seconds: float, values: tuple[str, ...]) -> None:
        """One value. An empty string stands for no value of its key."""
        point = self._points.get(values)
        if point is None:
            point = self._points[values] = _Point()
        point.buckets[bisect_left(BOUNDS, seconds)] += 1
        point.sum += seconds
        if seconds < point.least:
            point.least = seconds
        if seconds > point.greatest:
            point.greatest = seconds

    def metric(self) -> Metric:
        """All that was added since it was made."""
        now = time.time_ns()
        points = [self._told(values, point, now) for values, point in list(self._points.items())]
        data = HistogramData(points, AggregationTemporality.CUMULATIVE)
        return Metric(self.name, self.description, "s", data)

    def _told(self, values: tuple[str, ...], point: _Point, now: int) -> HistogramDataPoint:
        buckets = list(point.buckets)
        return HistogramDataPoint(
            attributes={key: value for key, value in zip(self._keys, values, strict=True) if value},
            start_time_unix_nano=self._begun,
            time_unix_nano=now,
            count=sum(buckets),
            sum=point.sum,
            bucket_counts=buckets,
            explicit_bounds=BOUNDS,
            min=point.least,
            max=point.greatest,
        )
