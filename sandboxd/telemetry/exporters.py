"""What sends to a collector, by signal and protocol. They read the OTEL_EXPORTER_OTLP_ variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as grpc_logs
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.http import _log_exporter as http_logs
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.sdk._logs.export import LogRecordExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace.export import SpanExporter

from sandboxd.telemetry.encoding import SpanExporter as GrpcSpans

Complete = Callable[[MetricsData | None], MetricsData]


def spans(protocol: str) -> SpanExporter:
    """Raises ValueError for variables that mean nothing, as the others do."""
    return GrpcSpans() if protocol == "grpc" else HttpSpans()


def metrics(protocol: str, complete: Complete) -> MetricExporter:
    """`complete` adds what no meter of the SDK knows to each export."""
    exporter = _GrpcMetrics() if protocol == "grpc" else _HttpMetrics()
    exporter.complete = complete
    return exporter


def logs(protocol: str) -> LogRecordExporter:
    return grpc_logs.OTLPLogExporter() if protocol == "grpc" else http_logs.OTLPLogExporter()


class _GrpcMetrics(GrpcMetrics):
    complete: Complete

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        return super().export(self.complete(metrics_data), timeout_millis, **kwargs)


class _HttpMetrics(HttpMetrics):
    complete: Complete

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        return super().export(self.complete(metrics_data), timeout_millis, **kwargs)
