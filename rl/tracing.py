"""Spans of an episode, from prompt to reward: `episode` around `generate`, `acquire`, `exec` and `verify`.

They go to the program's own OpenTelemetry where it has one, else to a collector where the OTEL_ variables say
so, else nowhere. The client passes them on to the daemon: what that does for an episode is in its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Thread

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from rl.types import Cancelled, Episode, Scored, Task, Truncated, Unscored

SCOPE = "sandboxd.rl"
FLUSH_SECONDS = 2.0
"""A run that ends waits so long for what is left to be sent."""

Span = trace.Span


def part(name: str, attributes: Mapping[str, AttributeValue] | None = None) -> AbstractContextManager[Span]:
    """A part of the episode that this task plays, with the error that ends it."""
    return trace.get_tracer(SCOPE).start_as_current_span(name, attributes=attributes)


def episode(task: Task) -> AbstractContextManager[Span]:
    """The whole of it; a trace of its own unless the caller is in the midst of one."""
    named: dict[str, AttributeValue] = {
        "rl.task.key": task.key,
        "rl.task.family": task.family,
        "rl.task.level": task.level,
    }
    return trace.get_tracer(SCOPE).start_as_current_span("episode", attributes=named)


def ended(span: Span, episode: Episode) -> None:
    """Says how it ended. What infrastructure did to it is the only failure: a wrong answer is none."""
    if not span.is_recording():
        return
    span.set_attribute("rl.episode.stop_reason", str(episode.stop_reason))
    span.set_attribute("rl.episode.turns", len(episode.turns))
    span.set_attribute("rl.episode.sampled_tokens", episode.sampled_count)
    match episode.outcome:
        case Scored(reward) | Truncated(_, reward):
            span.set_attribute("rl.episode.reward", reward)
        case Unscored(kind, stage, detail):
            span.set_attribute("error.type", kind)
            span.set_attribute("rl.episode.stage", stage)
            span.set_status(trace.StatusCode.ERROR, detail)
        case Cancelled(reason):
            span.set_attribute("rl.episode.cancelled", reason)


@contextmanager
def exported(protocol: str | None, run: str) -> Iterator[None]:
    """Sends the spans of the block to a collector, by `grpc` or `http/protobuf`; not at all when None.

    For a program of its own, whose global provider this sets. A collector that is away or hangs costs it
    nothing but FLUSH_SECONDS at its end.
    """
    if protocol is None:
        yield
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    exporter: SpanExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    resource = Resource.create({"service.name": "sandboxd-rl", "service.instance.id": run})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        ending = Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
