"""Spans as this project encodes them are those that the SDK's own encoding makes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind

from sandboxd.telemetry.encoding import Requests, readable
from sandboxd.telemetry.spans import Common, Span, Spans

OWNER = Spans(ALWAYS_ON, SpanProcessor())
RESOURCE, SCOPE = Resource({"service.name": "x"}), InstrumentationScope("sandboxd", "1")
# Some are longer than what one byte says the length of.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
value = st.one_of(
    text, st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.just(1.0)
)
told = st.dictionaries(st.text("abc.", min_size=1), value, max_size=6)


kinds = st.sampled_from([SpanKind.INTERNAL, SpanKind.SERVER])
parents = st.sampled_from([(b"", False), (b"\1" * 8, False), (b"\1" * 8, True)])
drawn = st.tuples(
    st.builds(Common, text, kinds, told),
    *(st.binary(min_size=16, max_size=16), parents, told, st.none() | text.map(lambda each: each * 20)),
    *(st.integers(0, 2), st.integers(0, 1 << 40)),
)


def made_of(one: Any) -> Span:
    common, trace, (parent, is_remote), own, fault, links, lasted = one
    span = Span(OWNER, common).set_ids(trace, parent, is_sampled=True, is_remote=is_remote)
    span.attributes = {key: each for key, each in own.items() if key not in common.attributes}
    span.fault, span.ended = fault, span.begun + lasted
    others = (Span(OWNER, common).set_ids(bytes(range(16)), b"", is_sampled=True) for _ in range(links))
    span.links = tuple(others)
    return span


def ordered(message: Any) -> Any:
    """Attributes are a set: their order says nothing. Neither does a status that is not set."""
    kept = type(message).FromString(message.SerializeToString())
    del kept.attributes[:]
    kept.attributes.extend(sorted(message.attributes, key=lambda each: str(each.key)))
    if not kept.status.ByteSize():
        kept.ClearField("status")
    return kept


@settings(max_examples=60)
@given(st.lists(drawn, min_size=1, max_size=3))
def test_they_say_the_same(all_of_them: list[Any]) -> None:
    made = [made_of(one) for one in all_of_them]
    ours = ExportTraceServiceRequest.FromString(Requests(RESOURCE, SCOPE).request(made))
    theirs = encode_spans([readable(span, RESOURCE, SCOPE) for span in made])
    lists = [request.resource_spans[0].scope_spans[0].spans for request in (ours, theirs)]
    mine, expected = ([ordered(span) for span in spans] for spans in lists)
    assert mine == expected
    for spans in lists:
        del spans[:]
    assert ours == theirs
