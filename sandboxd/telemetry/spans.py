"""Spans of a daemon, made whole when they end: an eighth of what the SDK's own cost, which commands feel.

Sampling, batching and sending are the SDK's. What belongs to a caller's trace is sampled as its caller is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from sandboxd.errors import SandboxdError
from sandboxd.telemetry.recorder import Attributes, Value, current

SAMPLED, DROPPED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
UNSET = Status(StatusCode.UNSET)
TRACEPARENT_LENGTH = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


class Span:
    """One that has not ended. What is added to `attributes` and `links` until then is told with it."""

    __slots__ = ("attributes", "begun", "context", "kind", "links", "name", "parent")

    def __init__(
        self, name: str, kind: SpanKind, context: SpanContext, parent: SpanContext | None, begun: int
    ) -> None:
        self.name, self.kind, self.context, self.parent, self.begun = name, kind, context, parent, begun
        self.attributes: dict[str, Value] = {}
        self.links: list[SpanContext] = []


class Spans:
    """Of one daemon. `resource` says who it is; `processor` is told of each span that ended."""

    def __init__(
        self, resource: Resource, sampler: Sampler, processor: SpanProcessor, scope: InstrumentationScope
    ) -> None:
        self._resource, self._sampler, self._processor, self._scope = resource, sampler, processor, scope
        self._as_parent = isinstance(sampler, ParentBased)

    def begin(self, name: str, kind: SpanKind, parent: SpanContext | None) -> Span:
        """A part of `parent`; a trace of its own where that is None."""
        begun = time.time_ns()
        trace = parent.trace_id if parent is not None else random.getrandbits(128) or 1
        if parent is not None and self._as_parent:
            flags = parent.trace_flags
        else:
            flags = self._decided(name, kind, parent, trace)
        context = SpanContext(trace, random.getrandbits(64) or 1, is_remote=False, trace_flags=flags)
        return Span(name, kind, context, parent, begun)

    def _decided(self, name: str, kind: SpanKind, parent: SpanContext | None, trace: int) -> TraceFlags:
        around = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
        decision = self._sampler.should_sample(around, trace, name, kind).decision
        return SAMPLED if decision is Decision.RECORD_AND_SAMPLE else DROPPED

    def end(self, span: Span, status: Status = UNSET, ended: int | None = None) -> None:
        """Tells of it, if it is sampled. `ended` is in nanoseconds since 1970, now when None."""
        if not span.context.trace_flags & TraceFlags.SAMPLED:
            return
        whole = ReadableSpan(
            span.name,
            span.context,
            span.parent,
            self._resource,
            span.attributes,
            links=[Link(other) for other in span.links],
            kind=span.kind,
            status=status,
            start_time=span.begun,
            end_time=ended or time.time_ns(),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(whole)

    @contextlib.contextmanager
    def step(self, name: str, attributes: Attributes, parent: Span | None) -> Iterator[Span]:
        """A span for the length of the block, which is the current one in it."""
        span = self.begin(name, SpanKind.INTERNAL, None if parent is None else parent.context)
        span.attributes.update(attributes)
        status, before = UNSET, current.set(span)
        try:
            yield span
        except BaseException as error:
            status = failed(span, error)
            raise
        finally:
            current.reset(before)
            self.end(span, status)


def failed(span: Span, error: BaseException) -> Status:
    """Writes on a span what ended it. What was given up is no fault."""
    if isinstance(error, asyncio.CancelledError):
        span.attributes["error.type"] = "cancelled"
        return UNSET
    if isinstance(error, SandboxdError):
        span.attributes["error.type"] = error.reason
        span.attributes["sandboxd.cause"] = error.cause.value
        if error.phase is not None:
            span.attributes["sandboxd.phase"] = error.phase.value
        return Status(StatusCode.ERROR, error.message)
    span.attributes["error.type"] = type(error).__name__
    return Status(StatusCode.ERROR, str(error))


def parsed(header: str) -> SpanContext | None:
    """The caller's span by its `traceparent`; None where that is none of version 00, or means nothing.

    https://www.w3.org/TR/trace-context/#traceparent-header
    """
    if len(header) != TRACEPARENT_LENGTH or not header.startswith("00-"):
        return None
    try:
        trace, span, flags = int(header[3:35], 16), int(header[36:52], 16), int(header[53:], 16)
    except ValueError:
        return None
    if not trace or not span:
        return None
    return SpanContext(trace, span, is_remote=True, trace_flags=SAMPLED if flags & 1 else DROPPED)
