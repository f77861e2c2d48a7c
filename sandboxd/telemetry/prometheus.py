"""The metrics as Prometheus scrapes them, by the names that OpenTelemetry's specification gives them there:
`rpc.server.call.duration` in seconds is `rpc_server_call_duration_seconds`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import Gauge, Histogram, HistogramDataPoint, Metric, MetricsData, Sum
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)

from sandboxd.config import ConfigError

UNSAFE = re.compile(r"[^a-zA-Z0-9_]")


def safe(name: str) -> str:
    """A name of a metric or a label as Prometheus allows it."""
    return UNSAFE.sub("_", name)


def family_name(name: str, unit: str | None) -> str:
    """Of a metric, without the `_total` of counters."""
    return safe(name) + ("_seconds" if unit == "s" else "")


class Collector:
    """Asks `collect` at each scrape."""

    def __init__(self, collect: Callable[[], MetricsData]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Family]:
        """One family for each metric."""
        for of_resource in self._collect().resource_metrics:
            labels = {safe(key): str(value) for key, value in of_resource.resource.attributes.items()}
            yield InfoMetricFamily("target", "What is scraped.", labels)
            for scope in of_resource.scope_metrics:
                for metric in scope.metrics:
                    yield _family(metric)


def _family(metric: Metric) -> Any:
    name, about, points = (
        family_name(metric.name, metric.unit),
        metric.description or "",
        metric.data.data_points,
    )
    keys = sorted({key for point in points for key in point.attributes or {}})
    labels = [safe(key) for key in keys]
    family: Any
    match metric.data:
        case Histogram():
            family = HistogramMetricFamily(name, about, labels=labels)
            for point in metric.data.data_points:
                family.add_metric(_values(point.attributes, keys), list(_buckets(point)), point.sum)
        case Sum(is_monotonic=True):
            family = CounterMetricFamily(name, about, labels=labels)
            for number in metric.data.data_points:
                family.add_metric(_values(number.attributes, keys), number.value)
        case Sum() | Gauge():
            family = GaugeMetricFamily(name, about, labels=labels)
            for number in metric.data.data_points:
                family.add_metric(_values(number.attributes, keys), number.value)
        case _:
            raise AssertionError(f"no instrument of the daemon makes {metric.data!r}")
    return family


def _values(attributes: Mapping[str, Any] | None, keys: Iterable[str]) -> list[str]:
    return [str((attributes or {}).get(key, "")) for key in keys]


def _buckets(point: HistogramDataPoint) -> Iterator[tuple[str, float]]:
    """Each with all below it, as Prometheus counts."""
    total = 0
    for bound, count in zip([*map(str, point.explicit_bounds), "+Inf"], point.bucket_counts, strict=True):
        total += count
        yield bound, total


def serve(address: str, collect: Callable[[], MetricsData]) -> tuple[str, Callable[[], None]]:
    """Serves the metrics by HTTP; returns where, and what ends it, which may take half a second. Raises
    ConfigError.
    """
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(Collector(collect))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"metrics = {address!r}: {why}; name another with --metrics") from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"{host}:{server.server_port}", end
