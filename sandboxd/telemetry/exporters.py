"""What sends to a collector, by signal and protocol. They read the OTEL_EXPORTER_OTLP_ variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as grpc_logs
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http import _log_exporter as http_logs
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk._logs.export import LogRecordExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from sandboxd.telemetry.encoding import Requests, readable

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
Complete = Callable[[MetricsData | None], MetricsData]


def spans(protocol: str, resource: Resource, scope: InstrumentationScope) -> SpanExporter:
    """Takes `Span`. Raises ValueError for variables that mean nothing, as the others do."""
    if protocol == "grpc":
        return _GrpcSpans(Requests(resource, scope))
    by_http = _HttpSpans()
    by_http.of = resource, scope
    return by_http


def metrics(protocol: str, complete: Complete) -> MetricExporter:
    """`complete` adds what no meter of the SDK knows to each export."""
    exporter = _GrpcMetrics() if protocol == "grpc" else _HttpMetrics()
    exporter.complete = complete
    return exporter


def logs(protocol: str) -> LogRecordExporter:
    return grpc_logs.OTLPLogExporter() if protocol == "grpc" else http_logs.OTLPLogExporter()


class _GrpcSpans(GrpcSpans):
    """The SDK's, but for what is sent: that is encoded, and not taken apart to be encoded by gRPC again."""

    def __init__(self, requests: Requests) -> None:
        super().__init__()
        self._requests = requests
        self._stub: Any = _AsTheyAre
        self._client: Any = _AsTheyAre(self._channel)

    def _translate_data(self, data: Sequence[Any]) -> Any:
        return self._requests.request(data)


class _AsTheyAre:
    """The collector's stub for requests that are encoded."""

    def __init__(self, channel: Any) -> None:
        self.Export = channel.unary_unary(EXPORT, response_deserializer=ExportTraceServiceResponse.FromString)


class _HttpSpans(HttpSpans):
    of: tuple[Resource, InstrumentationScope]

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        return super().export([readable(span, *self.of) for span in spans])


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
