"""Sends a run's numbers as OpenTelemetry metrics, where the OTEL_ variables say so; else imports nothing.

Each number of a step's row is a gauge of the same name (docs/rl.md has them); between steps, those that
the pacemaker looks at are set as they change. Endpoint, headers, interval and resource are read by the SDK.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.metrics import _Gauge as Gauge
    from opentelemetry.sdk.metrics.export import MetricExporter

FLUSH_SECONDS = 2.0
"""A run that ends waits so long for what is left to be sent."""

SCOPE = "sandboxd.rl"
ODD = re.compile(r"[^A-Za-z0-9_./-]")
"""What a name of an instrument may not hold; families named `package.module:Class` do."""


class Telemetry:
    """Sets gauges; without a meter it does nothing."""

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter
        self._gauges: dict[str, Gauge] = {}

    def record(self, row: Mapping[str, float]) -> None:
        """Takes the newest values. Those that are not finite are left out: no backend takes them alike."""
        if self._meter is None:
            return
        for name, value in row.items():
            if abs(value) < float("inf"):
                self._gauge(name).set(value)

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            assert self._meter is not None
            seconds = name.startswith("time/") or name.endswith("_s")
            unit = "s" if seconds and not name.endswith("tok_s") else "1"
            self._gauges[name] = self._meter.create_gauge(ODD.sub("_", name)[:255], unit)
        return self._gauges[name]


@contextmanager
def exported(protocol: str | None, run: str, *, flush_seconds: float = FLUSH_SECONDS) -> Iterator[Telemetry]:
    """For the length of the block, by `protocol` (`grpc` or `http/protobuf`); nothing at all when None.

    A collector that is away or hangs costs the run nothing but `flush_seconds` at its end.
    """
    if protocol is None:
        yield Telemetry()
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": "sandboxd-rl", "service.instance.id": run})
    reader = PeriodicExportingMetricReader(_exporter(protocol))
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    try:
        yield Telemetry(provider.get_meter(SCOPE))
    finally:
        provider.shutdown(timeout_millis=flush_seconds * 1e3)


def _exporter(protocol: str) -> MetricExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()
