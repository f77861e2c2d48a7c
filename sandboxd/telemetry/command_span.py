"""A command's span by the OpenTelemetry SDK, sent when the command ends. For a program of its own.

Named and described by the semantic conventions for command-line programs:
https://opentelemetry.io/docs/specs/semconv/cli/cli-spans/. Arguments are not told: they are the model's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from threading import Thread

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sandboxd import __version__
from sandboxd.config import ConfigError
from sandboxd.errors import SandboxdError

# A command that has ended waits so long for its span to be sent.
FLUSH_SECONDS = 2.0


@contextlib.contextmanager
def span(name: str, protocol: str, parent: str | None, state: str | None) -> Iterator[Callable[[int], None]]:
    """See `traced`. `parent` and `state` are a `traceparent` and `tracestate`. Raises ConfigError."""
    # What it says of a collector that is away would stand among the command's own errors: one line is said.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    try:
        provider = _provider(protocol)
    except ValueError as error:
        raise ConfigError(f"telemetry cannot be set up: {error}; correct the OTEL_ variables") from error
    carrier = {key: value for key, value in (("traceparent", parent), ("tracestate", state)) if value}
    around = TraceContextTextMapPropagator().extract(carrier, Context())
    about: dict[str, str | int] = {"process.executable.name": "sandboxd", "process.pid": os.getpid()}
    tracer = provider.get_tracer("sandboxd", __version__)
    try:
        with tracer.start_as_current_span(
            name, around, attributes=about, record_exception=False, set_status_on_exception=False
        ) as ours:

            def ended(code: int) -> None:
                ours.set_attribute("process.exit.code", code)
                if code:
                    ours.set_attribute("error.type", str(code))
                    ours.set_status(Status(StatusCode.ERROR))

            try:
                yield ended
            except SandboxdError as error:
                ours.set_attribute("error.type", error.reason)
                ours.set_status(Status(StatusCode.ERROR, error.message))
                raise
            except BaseException as error:
                ours.set_attribute("error.type", type(error).__name__)
                ours.set_status(Status(StatusCode.ERROR, str(error)))
                raise
    finally:
        # A collector that is away or hangs costs no more than this.
        ending = Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
        if ending.is_alive():
            sys.stderr.write(f"sandboxd: the collector took no span within {FLUSH_SECONDS:g} s\n")


def _provider(protocol: str) -> TracerProvider:
    exporter: SpanExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    named = Resource.create({"service.version": __version__})
    if str(named.attributes["service.name"]).startswith("unknown_service"):
        return named.merge(Resource({"service.name": "sandboxd-cli"}))
    return named
