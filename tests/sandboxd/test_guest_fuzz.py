"""Frames that no daemon would send, to a guest that ends at a memory error, an undefined step or a leak."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxd.guest import archive, wire

from .archive_kit import member, packed
from .guest_kit import NAMESPACES, OPTIONS, Raw, Started


@pytest.fixture(scope="module")
def connect(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Raw]]:
    """Opens connections to one guest, whose own root nothing it is told to remove lies outside of."""
    path = tmp_path_factory.mktemp("guest") / "s"
    started = Started(path, *NAMESPACES, program=sanitized, **OPTIONS)
    yield lambda: Raw(path)
    assert started.end() == 0


PATHS = st.sampled_from([b"a", b"d", b"d/x", b"d/y/z", b".", b"/", b"//", b"..", b"", b"\xff", b"a\0b"]).map(
    lambda path: path if path.startswith(b"/") or not path else b"/workspace/" + path
)
PROGRAMS = st.sampled_from(
    [
        [b"true"],
        [b"cat"],
        [b"sh", b"-c", b"echo out; echo err >&2; cat"],
        [b"sh", b"-c", b"yes | head -c 200000; sleep 0.1 & exit 3"],
        [b"sh", b"-c", b"setsid sleep 9 & sleep 9"],
        [b"sleep", b"0.05"],
        [b"no-such-program"],
        [b"/workspace"],
        [b""],
    ]
)
NUMBERS = st.sampled_from([0, 1, 5, 100, 70_000, (1 << 31) - 1])
TARS = [
    packed(
        member("f"), member("d/", b"5"), member("d/l", b"2", linkname="../f"), member("h", b"1", linkname="f")
    ),
    packed(member("x" * 300), member("d/y/z" * 30)),
    archive.header(archive.Entry(archive.REGULAR, b"n")) + archive.END,
]


@st.composite
def requests(draw: st.DrawFn) -> wire.ExecRequest:
    names = st.sampled_from([b"PATH", b"A", b"A", b"B=", b"=", b""])
    pairs = draw(
        st.lists(st.tuples(names, st.sampled_from([b"/usr/bin:/bin", b"", b":", b"x=y"])), max_size=4)
    )
    request = wire.ExecRequest(draw(PROGRAMS), draw(PATHS), pairs)
    request.timeout = draw(st.sampled_from([-1.0, 0.0, 0.05, 0.3, 1e300, float("nan"), float("inf")]))
    request.output_limit = draw(st.sampled_from([-1, 0, 3, 1000]))
    request.output_tail = draw(st.sampled_from([0, 0, 2, 1000]))
    request.has_stdin = draw(st.booleans())
    request.user = draw(st.sampled_from([b"", b"", b"root", b"4711:12", b":", b"n" * 300]))
    request.terminal = draw(st.sampled_from([(0, 0), (0, 0), (24, 80)]))
    return request


IDS = st.sampled_from([b"one", b"two", b"", b"x" * 255])


@st.composite
def first_frames(draw: st.DrawFn) -> bytes:
    """One that begins an operation."""
    kind = draw(st.sampled_from(b"EEBBWRPVTLMAUHQCF"))
    number, path, name = draw(NUMBERS), draw(PATHS), draw(IDS)
    offset = draw(st.sampled_from([0, 1, 1 << 62, (1 << 64) - 1]))
    payloads: dict[int, Callable[[], bytes]] = {
        wire.EXEC: lambda: draw(requests()).pack(),
        wire.START: lambda: wire.NamedRequest(
            name, draw(requests()), draw(st.binary(max_size=9)), draw(st.integers(0, 3))
        ).pack(),
        wire.WRITE: lambda: wire.WRITE_FIELDS.pack(number) + path,
        wire.READ: lambda: wire.READ_FIELDS.pack(offset, number - 1) + path,
        wire.REMOVE: lambda: wire.REMOVE_FIELDS.pack(draw(st.booleans())) + draw(PATHS.filter(_below)),
        wire.ATTACH: lambda: wire.ATTACH_FIELDS.pack(offset, number) + name,
        wire.SEND_SIGNAL: lambda: wire.SIGNAL_FIELDS.pack(number) + name,
        wire.FORGET: lambda: name,
        wire.UNPACK: lambda: draw(PATHS.filter(_below)),
    }
    return wire.frame(kind, payloads.get(kind, lambda: path)())


def _below(path: bytes) -> bool:
    """Without its programs the guest would show nothing more."""
    return path.strip(b"/.") != b"" and b".." not in path


@st.composite
def later_frames(draw: st.DrawFn) -> bytes:
    """One that may follow."""
    kind = draw(st.sampled_from(b"DDIIKG"))
    data = draw(
        st.one_of(st.just(b""), st.binary(max_size=600), st.sampled_from(TARS), st.just(b"y" * 300_000))
    )
    return wire.frame(kind, data[:4] if kind in b"KG" and draw(st.booleans()) else data)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A frame with a few bytes changed, behind its length or in it."""
    data = bytearray(draw(st.one_of(first_frames(), later_frames())))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=4)):
        # A removal stays where it is.
        if place < len(data) and data[0] not in b"MEB":
            data[place] = value
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


FRAMES = st.one_of(
    st.tuples(first_frames(), later_frames(), later_frames()).map(b"".join),
    later_frames(),
    spoiled(),
    st.binary(max_size=40).map(lambda payload: wire.frame(payload[0] if payload else 0, payload[1:])),
    st.just(wire.HEADER.pack(wire.EXEC, wire.MAX_REQUEST + 1)),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(FRAMES, st.sampled_from(["read", "leave"]))), max_size=12
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_a_guest_survives_whatever_it_is_sent(
    connect: Callable[[], Raw], steps: list[tuple[int, bytes | str]]
) -> None:
    open_now: dict[int, Raw] = {}
    for number, step in steps:
        raw = open_now.get(number) or open_now.setdefault(number, connect())
        if step == "leave":
            open_now.pop(number).close()
        elif step == "read":
            raw.sock.settimeout(0.01)
            try:
                raw.frame()
            except TimeoutError:
                continue
        elif isinstance(step, bytes):
            raw.sock.settimeout(0.05)
            try:
                raw.send(step)
            except TimeoutError:
                continue  # It waits until somebody reads.
    for raw in open_now.values():
        raw.close()
    assert alive(connect)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    whole=st.sampled_from(TARS),
    flips=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=6),
    size=st.integers(1, 3000),
)
def test_a_guest_survives_any_archive(
    connect: Callable[[], Raw], whole: bytes, flips: list[tuple[int, int]], size: int
) -> None:
    data = bytearray(whole)
    for place, value in flips:
        if place < len(data):
            data[place] = value
    raw = connect()
    pieces = [wire.frame(wire.DATA, bytes(data[start : start + size])) for start in range(0, len(data), size)]
    raw.send(wire.frame(wire.UNPACK, b"/workspace/t"), *pieces, wire.frame(wire.DATA))
    ((kind, _),) = raw.frames()
    assert kind in (wire.DONE, wire.ERROR)
    raw.close()
    assert alive(connect)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(0, (1 << 32) - 1), min_size=8, max_size=8),
    st.lists(st.one_of(st.integers(0, (1 << 32) - 1), st.integers(0, 9)), max_size=12),
    st.binary(max_size=80),
)
def test_no_counts_and_lengths_are_believed(
    connect: Callable[[], Raw], fields: list[int], lengths: list[int], tail: bytes
) -> None:
    """Of a request for a command: none of these is one, or its program is none."""
    request = wire.EXEC_FIELDS.pack(
        0.1, -1, fields[0], fields[1] & 1, 0, 0, fields[2] % 9 or fields[3], fields[4] % 5 or fields[5]
    )
    request += b"".join(length.to_bytes(4, "big") + bytes(min(length, 9)) for length in lengths) + tail
    named = wire.NAMED_FIELDS.pack(fields[6] & 1, fields[6] & 255, fields[7] % 99 or fields[7])
    for first in (wire.frame(wire.EXEC, request), wire.frame(wire.START, named + tail + request)):
        raw = connect()
        raw.send(first)
        assert [kind for kind, _ in raw.frames()] in ([], [wire.EXITED])
        raw.close()
    assert alive(connect)


def alive(connect: Callable[[], Raw]) -> bool:
    raw = connect()
    raw.send(wire.frame(wire.PING))
    answer = raw.frame()
    raw.close()
    return answer == (wire.PING, b"")


def test_the_sanitizers_are_there(sanitized: Path) -> None:
    """Else all of the above would prove little."""
    symbols = sanitized.read_bytes()
    assert b"__asan_init" in symbols
    assert b"__ubsan_handle" in symbols
    assert os.access(sanitized, os.X_OK)


def test_what_waits_behind_input_begins_nothing_on_a_connection_that_ends(connect: Callable[[], Raw]) -> None:
    """The command's first process is gone, the grace for its background child is not over, and its input is
    full: the end of the connection ends the command, which takes its hold on the connection's frames back.
    """
    first = wire.ExecRequest([b"sh", b"-c", b"exec 3<&0; sleep 9 <&3 & exit 0"], b"/", PATH)
    first.has_stdin = True
    evil = wire.ExecRequest([b"sh", b"-c", b"touch /tmp/evil; sleep 0.1; echo"], b"/", PATH).pack()
    # What the pipe takes, and what waits for it; then frames in the same piece.
    data = wire.frame(wire.STDIN, bytes(60_000)) * 5 + wire.frame(wire.STDIN, bytes(27_680))
    data += wire.frame(wire.EXEC, evil) * 1000
    for _ in range(5):
        raw = connect()
        raw.send(wire.frame(wire.EXEC, first.pack()))
        assert raw.frame() is not None
        look(connect, b"true")  # Its first process has ended by now.
        raw.sock.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            for start in range(0, len(data), 30_000):
                raw.send(data[start : start + 30_000])
        raw.close()
        assert alive(connect)
    assert look(connect, b"sleep 0.3; ls /tmp") == b""
    assert alive(connect)


PATH = [(b"PATH", b"/usr/bin:/bin")]


def look(connect: Callable[[], Raw], script: bytes) -> bytes:
    """What a script prints in the guest."""
    raw = connect()
    raw.send(wire.frame(wire.EXEC, wire.ExecRequest([b"sh", b"-c", script], b"/", PATH).pack()))
    frames = raw.frames()
    raw.close()
    assert frames, "the guest ended"
    return b"".join(payload[wire.OFFSET.size :] for kind, payload in frames if kind == wire.STDOUT)
