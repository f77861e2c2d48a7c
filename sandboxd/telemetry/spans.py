"""Spans of a daemon: an eighth of what the SDK's own cost, which commands of a millisecond would feel.

Sampling, batching and sending are the SDK's. What belongs to a caller's trace is sampled as its caller is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from random import getrandbits
from time import time_ns

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from sandboxd.errors import SandboxdError
from sandboxd.telemetry.recorder import Attributes, Value, current
from sandboxd.types import Exited

SAMPLED, DROPPED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
TRACEPARENT_LENGTH = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
NO_TRACE, NO_SPAN, IDS_LENGTH = bytes(16), bytes(8), 16 + 8
unhexed = bytes.fromhex

Metadata = Iterable[tuple[str, str | bytes]]


class _Sampled:
    """All that the SDK's processors look at. They are told of no other spans."""

    trace_flags = SAMPLED


class Common:
    """What many spans say alike. `encoded` is that as it is sent, once it is known."""

    __slots__ = ("attributes", "encoded", "kind", "name")

    def __init__(self, name: str, kind: SpanKind, attributes: Attributes) -> None:
        self.name, self.kind, self.attributes = name, kind, attributes
        self.encoded = b""


class Span:
    """One of them, and what is its own. Ids are 16 and 8 bytes, `parent_id` is empty where it has none.

    `is_remote` where its parent is a caller's. Times are in nanoseconds since 1970; `fault` says what failed.
    Flat, and without what is rarely there: one is made for each command. That of a call has its ids once it
    is `resolved`, from what its caller sent as `metadata`; `ran` is the command that it ran: its sandbox, and
    how it ended.
    """

    __slots__ = (
        *("attributes", "begun", "common", "ended", "fault", "is_remote", "is_sampled", "links", "metadata"),
        *("owner", "parent_id", "ran", "span_id", "trace_id"),
    )
    context = _Sampled()
    attributes: dict[str, Value]
    links: tuple[Span, ...]
    fault: str | None
    ended: int

    def __init__(self, owner: Spans, common: Common, metadata: Metadata = ()) -> None:
        self.owner, self.common, self.metadata, self.begun = owner, common, metadata, time_ns()
        self.trace_id = b""
        self.ran: tuple[str, Exited] | None = None

    def resolved(self) -> Span:
        """Itself, with all that it says."""
        if not self.trace_id:
            self.owner.resolve(self)
        return self

    def set_ids(
        self, trace_id: bytes, parent_id: bytes, *, is_sampled: bool, is_remote: bool = False
    ) -> Span:
        """Makes it whole: a part of another, or not."""
        self.trace_id, self.parent_id = trace_id, parent_id
        self.is_sampled, self.is_remote = is_sampled, is_remote
        # No secret, and never 0, which means none.
        self.span_id = (getrandbits(64) or 1).to_bytes(8, "big")
        self.attributes, self.links, self.fault, self.ended = {}, (), None, 0
        return self

    def whole(self) -> SpanContext:
        """Its ids as OpenTelemetry has them."""
        self.resolved()
        return whole(self.trace_id, self.span_id, is_sampled=self.is_sampled)


class Spans:
    """Of one daemon; `processor` is told of each that ended."""

    def __init__(self, sampler: Sampler, processor: SpanProcessor) -> None:
        self._sampler, self._processor = sampler, processor
        self._as_parent = isinstance(sampler, ParentBased)

    def resolve(self, span: Span) -> None:
        """Of a call: by the `traceparent` of its caller, if that means something.

        https://www.w3.org/TR/trace-context/#traceparent-header
        """
        header = ""
        for key, value in span.metadata:
            if key == "traceparent":
                header = str(value)
        # Spans wait to be sent; what they were made from need not.
        span.metadata = ()
        if len(header) != TRACEPARENT_LENGTH or header[:3] != "00-":
            self._root(span)
            return
        try:
            trace, parent, flags = unhexed(header[3:35]), unhexed(header[36:52]), int(header[53:], 16)
        except ValueError:
            self._root(span)
            return
        if trace == NO_TRACE or parent == NO_SPAN or len(trace) + len(parent) != IDS_LENGTH:
            self._root(span)
            return
        is_sampled = bool(flags & 1)
        if not self._as_parent:
            is_sampled = self._decided(span.common, trace, whole(trace, parent, is_sampled=is_sampled))
        span.set_ids(trace, parent, is_sampled=is_sampled, is_remote=True)

    def begin(self, common: Common, parent: Span | None) -> Span:
        """A part of `parent`; a trace of its own where that is None."""
        span = Span(self, common)
        if parent is None:
            return self._root(span)
        parent.resolved()
        is_sampled = parent.is_sampled
        if not self._as_parent:
            is_sampled = self._decided(common, parent.trace_id, parent.whole())
        return span.set_ids(parent.trace_id, parent.span_id, is_sampled=is_sampled)

    def _root(self, span: Span) -> Span:
        trace = (getrandbits(128) or 1).to_bytes(16, "big")
        return span.set_ids(trace, b"", is_sampled=self._decided(span.common, trace, None))

    def _decided(self, common: Common, trace: bytes, parent: SpanContext | None) -> bool:
        around = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
        number = int.from_bytes(trace, "big")
        result = self._sampler.should_sample(around, number, common.name, common.kind, common.attributes)
        return result.decision is Decision.RECORD_AND_SAMPLE

    def end(self, span: Span, ended: int | None = None) -> None:
        """Tells of it, if it is sampled. `ended` is now when None."""
        if span.is_sampled:
            span.ended = ended or time_ns()
            # Typed as the SDK's own: it looks at nothing but whether it is sampled, and hands it on.
            self._processor.on_end(span)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def step(self, name: str, attributes: Attributes, parent: Span | None) -> Iterator[Span]:
        """A span for the length of the block, which is the current one in it."""
        span = self.begin(_internal(name), parent)
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


def whole(trace: bytes, span: bytes, *, is_sampled: bool, is_remote: bool = False) -> SpanContext:
    """Ids as OpenTelemetry has them."""
    flags = SAMPLED if is_sampled else DROPPED
    return SpanContext(int.from_bytes(trace, "big"), int.from_bytes(span, "big"), is_remote, flags)


@cache
def _internal(name: str) -> Common:
    return Common(name, SpanKind.INTERNAL, {})


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
