"""Spans of a daemon: an eighth of what the SDK's own cost, which commands of a millisecond would feel.

Sampling, batching and sending are the SDK's. What belongs to a caller's trace is sampled as its caller is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from functools import cache

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from sandboxd.errors import SandboxdError
from sandboxd.telemetry.recorder import Attributes, Value, current

SAMPLED, DROPPED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
TRACEPARENT_LENGTH = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
NO_TRACE, NO_SPAN = bytes(16), bytes(8)


class Context:
    """Which span of which trace: 16 and 8 bytes. `is_remote` where it is a caller's."""

    __slots__ = ("is_remote", "is_sampled", "span_id", "trace_id")

    def __init__(self, trace_id: bytes, span_id: bytes, *, is_sampled: bool, is_remote: bool = False) -> None:
        self.trace_id, self.span_id = trace_id, span_id
        self.is_sampled, self.is_remote = is_sampled, is_remote

    @property
    def trace_flags(self) -> TraceFlags:
        """As OpenTelemetry has it."""
        return SAMPLED if self.is_sampled else DROPPED

    def whole(self) -> SpanContext:
        """As OpenTelemetry has it."""
        trace, span = int.from_bytes(self.trace_id, "big"), int.from_bytes(self.span_id, "big")
        return SpanContext(trace, span, self.is_remote, self.trace_flags)


class Common:
    """What many spans say alike. `encoded` is that as it is sent, once it is known."""

    __slots__ = ("attributes", "encoded", "kind", "name")

    def __init__(self, name: str, kind: SpanKind, attributes: Attributes) -> None:
        self.name, self.kind, self.attributes = name, kind, attributes
        self.encoded = b""


class Span:
    """One of them, and what is its own. Times are in nanoseconds since 1970; `fault` says what failed."""

    __slots__ = ("attributes", "begun", "common", "context", "ended", "fault", "links", "parent")

    def __init__(self, common: Common, context: Context, parent: Context | None) -> None:
        self.common, self.context, self.parent = common, context, parent
        self.attributes: dict[str, Value] = {}
        self.links: list[Context] = []
        self.fault: str | None = None
        self.begun, self.ended = time.time_ns(), 0


class Spans:
    """Of one daemon; `processor` is told of each that ended."""

    def __init__(self, sampler: Sampler, processor: SpanProcessor) -> None:
        self._sampler, self._processor = sampler, processor
        self._as_parent = isinstance(sampler, ParentBased)

    def begin(self, common: Common, parent: Context | None) -> Span:
        """A part of `parent`; a trace of its own where that is None."""
        trace = _drawn(128) if parent is None else parent.trace_id
        if parent is not None and self._as_parent:
            is_sampled = parent.is_sampled
        else:
            is_sampled = self._decided(common, parent, trace)
        return Span(common, Context(trace, _drawn(64), is_sampled=is_sampled), parent)

    def _decided(self, common: Common, parent: Context | None, trace: bytes) -> bool:
        around = None if parent is None else set_span_in_context(NonRecordingSpan(parent.whole()))
        number = int.from_bytes(trace, "big")
        result = self._sampler.should_sample(around, number, common.name, common.kind, common.attributes)
        return result.decision is Decision.RECORD_AND_SAMPLE

    def end(self, span: Span, ended: int | None = None) -> None:
        """Tells of it, if it is sampled. `ended` is now when None."""
        if span.context.is_sampled:
            span.ended = ended or time.time_ns()
            # Typed as the SDK's own: it looks at nothing but whether it is sampled, and hands it on.
            self._processor.on_end(span)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def step(self, name: str, attributes: Attributes, parent: Span | None) -> Iterator[Span]:
        """A span for the length of the block, which is the current one in it."""
        span = self.begin(_internal(name), None if parent is None else parent.context)
        span.attributes.update(attributes)
        before = current.set(span)
        try:
            yield span
        except BaseException as error:
            told, span.fault = failure(error)
            span.attributes.update(told)
            raise
        finally:
            current.reset(before)
            self.end(span)


@cache
def _internal(name: str) -> Common:
    return Common(name, SpanKind.INTERNAL, {})


def _drawn(bits: int) -> bytes:
    # No secret, and never 0, which means none.
    return (random.getrandbits(bits) or 1).to_bytes(bits // 8, "big")


def failure(error: BaseException) -> tuple[Mapping[str, Value], str | None]:
    """What a span says of what ended it, and the fault in words. What was given up is none."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return {"error.type": "CANCELLED"}, None
    if not isinstance(error, SandboxdError):
        return {"error.type": type(error).__name__}, str(error)
    told: dict[str, Value] = {"error.type": error.reason, "sandboxd.cause": error.cause.value}
    if error.phase is not None:
        told["sandboxd.phase"] = error.phase.value
    return told, error.message


def parsed(header: str) -> Context | None:
    """The caller's span by its `traceparent`; None where that is none of version 00, or means nothing.

    https://www.w3.org/TR/trace-context/#traceparent-header
    """
    if len(header) != TRACEPARENT_LENGTH or not header.startswith("00-"):
        return None
    try:
        trace, span = bytes.fromhex(header[3:35]), bytes.fromhex(header[36:52])
        flags = int(header[53:], 16)
    except ValueError:
        return None
    if len(trace) != len(NO_TRACE) or len(span) != len(NO_SPAN) or trace == NO_TRACE or span == NO_SPAN:
        return None
    return Context(trace, span, is_sampled=bool(flags & 1), is_remote=True)
