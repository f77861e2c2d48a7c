"""The client's part of a trace: calls carry the caller's span, as W3C Trace Context says, if it has one.

Nothing of OpenTelemetry is imported: where the caller has not imported it, it has no span.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

# https://www.w3.org/TR/trace-context/#traceparent-header: neither id may be all zeros, no version is ff.
MEANINGFUL = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
inherited: ContextVar[str | None] = ContextVar("inherited", default=None)
"""The `traceparent` that a command was started with: what its calls carry where it has no span of its own."""


def given(environ: Mapping[str, str]) -> str | None:
    """The `traceparent` of whoever started this program; None where there is none that means something.

    https://opentelemetry.io/docs/specs/otel/context/env-carriers/
    """
    said = environ.get("TRACEPARENT", "")
    return said if MEANINGFUL.fullmatch(said) else None


def header() -> str | None:
    """The `traceparent` of the span that this task works on; None where it works on none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return inherited.get()
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return inherited.get()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class Propagating:
    """A channel for the stubs of a client. Its calls cost one look at a table more than those of the channel
    behind it; gRPC's own interceptors make a task for each.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """As the channel's; so are the others."""
        return _carrying(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return _carrying(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return _carrying(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return _carrying(self._channel.stream_stream(*arguments, **options))


def _carrying(call: Callable[..., Any]) -> Callable[..., Any]:
    def carry(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
        parent = header()
        if parent is not None:
            metadata = (*(metadata or ()), ("traceparent", parent))
        return call(*arguments, metadata=metadata, **options)

    return carry
