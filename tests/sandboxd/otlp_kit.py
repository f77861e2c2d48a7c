"""A collector of the tests' own: receives what a daemon sends by OTLP over gRPC, and says what came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_pb
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


def value(any_value: Any) -> Any:
    """Of an attribute."""
    return getattr(any_value, any_value.WhichOneof("value"))


def attributes(message: Any) -> dict[str, Any]:
    """Of a span, a point, a resource or a log record."""
    return {each.key: value(each.value) for each in message.attributes}


class Collector(
    trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer, logs_grpc.LogsServiceServicer
):
    """What came since it was made, in order."""

    def __init__(self) -> None:
        self.address = ""
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.logs: list[Any] = []
        self._came = asyncio.Event()

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC names it
        """Serves all three services."""
        match request:
            case trace_pb.ExportTraceServiceRequest():
                for of_resource in request.resource_spans:
                    self.resources.append(attributes(of_resource.resource))
                    self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
                answer: Any = trace_pb.ExportTraceServiceResponse()
            case metrics_pb.ExportMetricsServiceRequest():
                for measured in request.resource_metrics:
                    for group in measured.scope_metrics:
                        self.metrics |= {metric.name: metric for metric in group.metrics}
                answer = metrics_pb.ExportMetricsServiceResponse()
            case _:
                for of_resource in request.resource_logs:
                    self.logs += [each for scope in of_resource.scope_logs for each in scope.log_records]
                answer = logs_pb.ExportLogsServiceResponse()
        self._came.set()
        return answer

    async def until(self, there: Callable[[], bool]) -> None:
        """Waits until what has come is enough."""
        async with asyncio.timeout(20):
            while not there():
                self._came.clear()
                await self._came.wait()

    def trace(self, trace_id: int) -> list[Any]:
        """The spans of one trace, in the order of their beginnings."""
        ours = [span for span in self.spans if int.from_bytes(span.trace_id, "big") == trace_id]
        return sorted(ours, key=lambda span: span.start_time_unix_nano)

    def tree(self, trace_id: int) -> list[str]:
        """The names of a trace's spans, each indented below its parent."""
        spans = self.trace(trace_id)
        known = {span.span_id for span in spans}
        lines: list[str] = []

        def below(parent: bytes, depth: int) -> None:
            for span in spans:
                if span.parent_span_id == parent:
                    lines.append("  " * depth + span.name.rpartition("/")[2])
                    below(span.span_id, depth + 1)

        for outside in dict.fromkeys(s.parent_span_id for s in spans if s.parent_span_id not in known):
            below(outside, 0)
        return lines


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """One that listens for as long as the block runs."""
    ours, server = Collector(), grpc.aio.server()
    trace_grpc.add_TraceServiceServicer_to_server(ours, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(ours, server)
    logs_grpc.add_LogsServiceServicer_to_server(ours, server)
    ours.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield ours
    finally:
        await server.stop(None)
