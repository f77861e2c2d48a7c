"""Messages for every method that the proto declares, by chance: right, wrong, huge and contradictory ones.

What is drawn for a field follows from its type, and from its name where a type says too little: a new method
is covered by being declared. Nothing here leads out of a fake sandbox's directory, whose commands are plain
processes of this user.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from sandboxd.v1 import sandbox_service_pb2 as pb

POOL, SANDBOX = "pools/python", "sandboxes/LIVE"
METHODS: list[MethodDescriptor] = [
    method for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
]
TEXTS = st.text(max_size=8) | st.sampled_from(
    [
        *("", "a", "cmd", "1", "-1", "²", "9" * 5000, "a/b", "\0", "na\u00efve \u2603 \u202e\ud7ff\nline"),
        *(POOL, SANDBOX, "pools/-", "pools/", "pools/other", "sandboxes/", "sandboxes/python-0"),
        *("x" * 300, "y" * 70_000),
    ]
)
COMMAND_IDS = st.sampled_from(["cmd", "other"]) | TEXTS
PATHS = st.sampled_from(
    [b"f", b"d", b"d/x", b".", b"", b"\xff", b"a\0b", b"n" * 300, b"l/" * 3000, b"/workspace/f"]
)
PROGRAMS: st.SearchStrategy[list[bytes]] = st.sampled_from(
    [
        *([b"true"], [b"cat"], [b"sh", b"-c", b"echo out; echo err >&2; exit 3"], [b"no-such-program"]),
        *([b"true", b"x" * 200_000], [b"/workspace"], [b"a\0b"], [b"\xff"], [b""], []),
    ]
)
DATA = st.binary(max_size=20) | st.sampled_from([b"A", b"B=", b"x" * 600, bytes((1 << 20) + 1)])
NUMBERS = [0, 1, 2, 3, -1, 9, 64, 65, 1000, 1001, 65_535, 65_536, 1_000_001]
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: [*NUMBERS, (1 << 31) - 1, -(1 << 31)],
    FieldDescriptor.CPPTYPE_INT64: [*NUMBERS, (1 << 63) - 1, -(1 << 63)],
    FieldDescriptor.CPPTYPE_UINT32: [*filter(lambda number: number >= 0, NUMBERS), (1 << 32) - 1],
    FieldDescriptor.CPPTYPE_UINT64: [*filter(lambda number: number >= 0, NUMBERS), (1 << 64) - 1],
}
SECONDS = st.sampled_from(
    [0, 1, 60, -1, 10_000_000, 10_000_001, 315_576_000_000, -315_576_000_000, (1 << 63) - 1, -(1 << 63)]
)
NANOS = st.sampled_from([0, 1, -1, 20_000_000, 999_999_999, 1_000_000_000, (1 << 31) - 1, -(1 << 31)])


def _scalar(field: FieldDescriptor, resource: str) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return PATHS if field.name in ("path", "cwd") else DATA
        case FieldDescriptor.CPPTYPE_STRING if field.name in ("name", "pool"):
            # Mostly right, or no call would come further than to its name.
            right = st.just(POOL if field.name == "pool" else resource)
            return st.one_of(right, right, right, TEXTS)
        case FieldDescriptor.CPPTYPE_STRING:
            return COMMAND_IDS if field.name in ("command_id", "resume_id") else TEXTS
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            return st.sampled_from([*field.enum_type.values_by_number, 99, -1])
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.sampled_from([0.0, 1.5, -1.0, float("inf"), float("nan")])
        case kind:
            return st.sampled_from(INTEGERS[kind])


def _value(field: FieldDescriptor, resource: str) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, resource)
    return _scalar(field, resource)


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, resource: str) -> Message:
    """One of this kind, about `resource` where it names one of any kind."""
    made = message_factory.GetMessageClass(kind)()
    message: Any = made
    if kind.full_name in ("google.protobuf.Duration", "google.protobuf.Timestamp"):
        message.seconds, message.nanos = draw(SECONDS), draw(NANOS)
        return made
    for field in kind.fields:
        if field.name not in ("name", "pool", "argv") and draw(st.integers(0, 2)) == 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            pairs = st.dictionaries(TEXTS, TEXTS, max_size=3) | st.just({f"k{n}": "v" for n in range(40)})
            getattr(message, field.name).update(draw(pairs))
        elif field.is_repeated:
            one = PROGRAMS if field.name == "argv" else st.lists(_value(field, resource), max_size=3)
            getattr(message, field.name).extend(draw(one))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(_value(field, resource)))
        else:
            setattr(message, field.name, draw(_scalar(field, resource)))
    return made


def requests(method: MethodDescriptor) -> st.SearchStrategy[list[Message]]:
    """What a call of the method sends: one message, or several where it streams."""
    resource = POOL if "Pool" in method.containing_service.name else SANDBOX
    one = messages(method.input_type, resource)
    most = 4 if method.client_streaming else 1
    return st.lists(one, min_size=0 if method.client_streaming else 1, max_size=most)


def living(message: Any, sandbox: str) -> None:
    """Has every field that names the living sandbox name this one."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            if not field.message_type.GetOptions().map_entry:
                for each in value if field.is_repeated else [value]:
                    living(each, sandbox)
        elif value == SANDBOX:
            setattr(message, field.name, sandbox)


def field_names(kind: Descriptor) -> Iterator[str]:
    """Of a message and all that are in it."""
    for field in kind.fields:
        yield field.name
        if field.message_type is not None and not field.message_type.full_name.startswith("google."):
            yield from field_names(field.message_type)
