"""What a guest does with frames that are out of place, too many, or more than it has room for."""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.guest import wire

from .guest_kit import NAMESPACES, Raw, Started

ANSWER = (wire.PING, b"")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    started = Started(tmp_path / "s")
    yield tmp_path / "s"
    assert started.end() == 0


def command(
    *argv: bytes, env: list[tuple[bytes, bytes]] | None = None, has_stdin: bool = False
) -> wire.ExecRequest:
    request = wire.ExecRequest(list(argv), b"/", [(b"PATH", b"/usr/bin:/bin"), *(env or [])])
    request.has_stdin = has_stdin
    return request


def start(name: bytes, request: wire.ExecRequest, *, detached: bool = True) -> bytes:
    bond = wire.DETACHED if detached else wire.HELD
    return wire.frame(wire.START, wire.NamedRequest(name, request, b"", bond).pack())


def alive(path: Path) -> bool:
    raw = Raw(path)
    raw.send(wire.frame(wire.PING))
    answer = raw.frame()
    raw.close()
    return answer == ANSWER


def run(path: Path, request: wire.ExecRequest) -> tuple[bytes, bytes]:
    """What it printed, and the payload of its end."""
    raw = Raw(path)
    raw.send(wire.frame(wire.EXEC, request.pack()))
    frames = raw.frames()
    raw.close()
    output = b"".join(payload[wire.OFFSET.size :] for kind, payload in frames if kind == wire.STDOUT)
    return output, frames[-1][1]


WHOLE = command(b"true").pack()
MALFORMED = {
    "too long": wire.HEADER.pack(wire.EXEC, wire.MAX_REQUEST + 1),
    "no operation": wire.frame(ord("?")),
    "an answer": wire.frame(wire.STARTED, b"\0\0\0\1"),
    "data first": wire.frame(wire.DATA, b"x"),
    "a short command": wire.frame(wire.EXEC, WHOLE[:20]),
    "a command that ends early": wire.frame(wire.EXEC, WHOLE[:-1]),
    "a command with more behind it": wire.frame(wire.EXEC, WHOLE + b"x"),
    "a command without argv": wire.frame(wire.EXEC, wire.ExecRequest([], b"/", []).pack()),
    "a NUL in argv": wire.frame(wire.EXEC, command(b"tr\0ue").pack()),
    "a NUL in a value": wire.frame(wire.EXEC, command(b"true", env=[(b"A", b"\0")]).pack()),
    "a variable without a name": wire.frame(wire.EXEC, command(b"true", env=[(b"", b"x")]).pack()),
    "an = in a name": wire.frame(wire.EXEC, command(b"true", env=[(b"A=B", b"x")]).pack()),
    "more strings than there are": wire.frame(
        wire.EXEC, wire.EXEC_FIELDS.pack(-1.0, -1, 0, False, 0, 0, 2**32 - 1, 2**32 - 1) + bytes(64)
    ),
    "a short start": wire.frame(wire.START, b"\0\1"),
    "a start that ends in its id": wire.frame(wire.START, wire.NAMED_FIELDS.pack(0, 255, 0) + b"it"),
    "a start that ends in its input": wire.frame(wire.START, wire.NAMED_FIELDS.pack(0, 2, 2**32 - 1) + b"it"),
    "a short attach": wire.frame(wire.ATTACH, b"1234"),
    "a signal without a number": wire.frame(wire.SEND_SIGNAL, b"it"),
    "a file without a path": wire.frame(wire.READ, wire.READ_FIELDS.pack(0, -1)),
    "a short file": wire.frame(wire.WRITE, b"1"),
    "a word to no command": wire.frame(wire.COMMANDS) + wire.frame(wire.FORGET),
    "no data for a file": wire.frame(wire.UNPACK, b"/proc/self/none/x") + wire.frame(ord("?")),
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_malformed_ends_its_connection_and_no_other(path: Path, frames: bytes) -> None:
    other, raw = Raw(path), Raw(path)
    other.send(wire.frame(wire.EXEC, command(b"cat", has_stdin=True).pack()))
    assert other.frame() is not None
    raw.send(frames)
    while (found := raw.frame()) is not None:
        assert found[0] in (wire.DATA, wire.ERROR)
    other.send(wire.frame(wire.STDIN, b"still there"), wire.frame(wire.STDIN))
    assert (wire.STDOUT, wire.OFFSET.pack(0) + b"still there") in other.frames()
    other.close()
    raw.close()


def test_a_connection_serves_one_operation_after_the_other(path: Path) -> None:
    """Also behind words that came too late for the one before, and behind one that failed."""
    raw = Raw(path)
    late = wire.frame(wire.STDIN, b"x") + wire.frame(wire.SIGNAL, struct.pack("!I", 9))
    asked = [
        (wire.frame(wire.EXEC, WHOLE), wire.EXITED),
        (late + wire.frame(wire.READ, wire.READ_FIELDS.pack(0, -1) + b"/no/such"), wire.ERROR),
        (start(b"it", command(b"true")), wire.EXITED),
        (late + start(b"it", command(b"true")), wire.ERROR),
        (wire.frame(wire.EXEC, command(b"/no/such").pack()), wire.EXITED),
        (late + wire.frame(wire.FORGET, b"it"), wire.DONE),
        (start(b"it", command(b"true"), detached=False), wire.EXITED),
        (wire.frame(wire.PING, wire.KEPT), wire.PING),
        (wire.frame(wire.ATTACH, wire.ATTACH_FIELDS.pack(0, 0) + b"it"), wire.EXITED),
    ]
    for frames, end in asked:
        raw.send(frames)
        kinds: list[int] = []
        while not kinds or kinds[-1] != end:
            found = raw.frame()
            assert found is not None, (frames, kinds)
            kinds.append(found[0])
    raw.close()


@pytest.mark.parametrize("named", [False, True])
def test_the_next_operation_lets_go_of_a_command_that_runs(path: Path, named: bool) -> None:
    raw = Raw(path)
    first = command(b"sh", b"-c", b"echo $$; exec sleep 1000")
    raw.send(start(b"it", first, detached=False) if named else wire.frame(wire.EXEC, first.pack()))
    while (found := raw.frame()) is not None and found[0] != wire.STDOUT:
        pass
    assert found is not None
    pid = int(found[1][wire.OFFSET.size :])
    raw.send(
        wire.frame(wire.EXEC, command(b"sh", b"-c", b"while kill -0 %d; do sleep .01; done" % pid).pack())
    )
    while (found := raw.frame()) is not None and found[0] != wire.EXITED:
        pass
    assert found is not None
    raw.close()


@pytest.mark.parametrize(
    "bad", [wire.frame(wire.SIGNAL, struct.pack("!I", 500)), wire.frame(wire.DATA, b"x")]
)
def test_what_is_malformed_behind_input_that_waits(path: Path, bad: bytes) -> None:
    """It is read long after it came, when the command takes its input and not when the daemon sends."""
    raw = Raw(path)
    raw.send(
        wire.frame(wire.EXEC, command(b"sh", b"-c", b"sleep 0.1; cat >/dev/null", has_stdin=True).pack())
    )
    raw.send(wire.frame(wire.STDIN, bytes(400_000)), bad)
    assert raw.frames()[-1][0] != wire.EXITED
    raw.close()
    assert alive(path)


def test_a_name_that_comes_twice_has_its_last_value(path: Path) -> None:
    request = command(b"env", env=[(b"A", b"1"), (b"B", b"2"), (b"A", b"3"), (b"AA", b""), (b"B", b"4")])
    assert run(path, request)[0] == b"PATH=/usr/bin:/bin\nA=3\nB=4\nAA=\n"


def test_the_program_is_looked_for_on_the_commands_own_path(path: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mine").write_text("#!/bin/sh\necho mine\n")
    (tmp_path / "bin" / "mine").chmod(0o755)
    (tmp_path / "dir" / "mine").mkdir(parents=True)
    for search in (f"{tmp_path}/dir:{tmp_path}/bin/", f":{tmp_path}/bin", "bin", ""):
        request = command(b"mine", env=[(b"PATH", search.encode())])
        request.cwd = os.fsencode(tmp_path if search else tmp_path / "bin")
        assert run(path, request)[0] == b"mine\n", search
    request = command(b"mine", env=[(b"PATH", b"/usr/bin:" + b"x" * 5000)])
    assert run(path, request)[1].endswith(b"mine: not found on PATH")


def test_a_daemon_that_does_not_hear_its_pings(path: Path) -> None:
    raw = Raw(path)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(2000):
            raw.sock.sendall(wire.frame(wire.PING) * 1000)
    raw.close()
    assert alive(path)


def test_input_that_a_named_command_does_not_take(path: Path) -> None:
    """A reader of it is not told to wait, and so has no right to send for ever."""
    raw = Raw(path)
    raw.send(start(b"it", command(b"sleep", b"100", has_stdin=True), detached=False))
    assert raw.frame() is not None
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(100):
            raw.sock.sendall(wire.frame(wire.STDIN, bytes(1 << 20)))
    raw.close()
    assert alive(path)


def test_without_a_free_descriptor_connections_wait(tmp_path: Path) -> None:
    started = Started(tmp_path / "s", "prlimit", "--nofile=16")
    first = [Raw(tmp_path / "s") for _ in range(30)]
    for raw in first:
        raw.send(wire.frame(wire.PING))
    assert first[0].frame() == ANSWER
    for raw in first[:29]:
        raw.close()
    assert first[29].frame() == ANSWER
    first[29].close()
    # A command needs several: told as what could not be started, and nothing is left open.
    held = [Raw(tmp_path / "s") for _ in range(6)]
    for raw in held:
        raw.send(wire.frame(wire.PING))
        assert raw.frame() == ANSWER
    for _ in range(5):
        held[0].send(wire.frame(wire.EXEC, command(b"true", has_stdin=True).pack()))
        ((kind, payload),) = held[0].frames()
        assert (kind, payload[0]) == (wire.EXITED, wire.REASONS.index("NOT_STARTED"))
        assert payload.endswith(b"true: Too many open files")
        held[0].close()
        held[0] = Raw(tmp_path / "s")
        held[0].send(wire.frame(wire.PING))
        assert held[0].frame() == ANSWER
    for raw in held:
        raw.close()
    assert started.end() == 0


def test_what_its_starter_ignored_is_not_handed_down(tmp_path: Path) -> None:
    started = Started(tmp_path / "s", "sh", "-c", 'trap "" USR1 HUP QUIT; exec "$0" "$@"')
    said = run(tmp_path / "s", command(b"grep", b"SigIgn", b"/proc/self/status"))[0]
    assert said == b"SigIgn:\t" + b"0" * 16 + b"\n"
    assert started.end() == 0


def test_nothing_of_the_guest_is_handed_down(path: Path) -> None:
    script = b"ls /proc/self/fd; grep -E '^(Sig(Blk|Ign)|NoNewPrivs)' /proc/self/status"
    found = run(path, command(b"sh", b"-c", script))[0].decode().split("\n")
    assert found[:4] == ["0", "1", "2", "3"], "the last is what ls itself reads"
    assert set(found[4:-1]) == {"NoNewPrivs:\t1", "SigBlk:\t" + "0" * 16, "SigIgn:\t" + "0" * 16}
    limits = run(path, command(b"grep", b"realtime timeout", b"/proc/self/limits"))[0].split()
    assert limits[3].isdigit(), "its own value of the limit is what a command is known by"
    assert limits[4] == b"unlimited"


STOLEN = rb"""
import os, sys, time
again = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
filler = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK)
full = time.monotonic() + 0.2
while time.monotonic() < full:
    try:
        os.write(filler, bytes(65536))
    except BlockingIOError:
        time.sleep(0.01)
if os.fork():
    os._exit(0)
os.setsid()
os.close(2)
time.sleep(0.5)
try:
    while os.read(again, 65536):
        pass
except BlockingIOError:
    os.close(os.open(sys.argv[1], os.O_WRONLY))
    time.sleep(15)
"""


def test_a_command_ends_whose_last_bytes_another_has_read(path: Path, tmp_path: Path) -> None:
    """Its background child empties the pipe after the guest has counted what is in there."""
    os.mkfifo(tmp_path / "empty")
    program = sys.executable.encode()
    request = command(program, b"-I", b"-S", b"-c", STOLEN, os.fsencode(tmp_path / "empty"))
    request.timeout = 20.0
    raw = Raw(path)
    raw.send(wire.frame(wire.EXEC, request.pack()))
    assert raw.frame() is not None
    # Nobody takes the output until the grace is over and the pipe is empty again.
    (tmp_path / "empty").read_bytes()
    assert raw.frames()[-1][0] == wire.EXITED
    raw.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes another user")
def test_why_a_directory_cannot_be_made(tmp_path: Path) -> None:
    started = Started(tmp_path / "s", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    for file in (b"/usr/none/file", b"/usr/none/deep/er/file"):
        raw = Raw(tmp_path / "s")
        raw.send(wire.frame(wire.WRITE, wire.WRITE_FIELDS.pack(0o644) + file))
        ((kind, payload),) = raw.frames()
        assert (kind, payload[4:]) == (wire.ERROR, b"Permission denied"), payload
        raw.close()
    assert started.end() == 0


FULL = """
import ctypes, errno, os, platform, struct, sys
call = {"x86_64": 233, "aarch64": 21}[platform.machine()]
code = [
    (0x20, 0, 0, 0), (0x15, 0, 5, call),  # epoll_ctl
    (0x20, 0, 0, 24), (0x15, 0, 3, 1),  # of a new one
    (0x20, 0, 0, 32), (0x35, 0, 1, 60),  # whose number is 60 or more
    (0x06, 0, 0, 0x00050000 | errno.ENOSPC), (0x06, 0, 0, 0x7FFF0000),
]
lines = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(lines)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_where_the_kernel_watches_no_more_only_the_new_fails(tmp_path: Path) -> None:
    """The kernel's bound on what a user watches is many sandboxes' together: here a filter stands for it."""
    started = Started(tmp_path / "s", sys.executable, "-I", "-S", "-c", FULL)
    held: list[Raw] = []
    while True:
        raw = Raw(tmp_path / "s")
        raw.send(wire.frame(wire.PING))
        if raw.frame() is None:
            raw.close()
            break
        held.append(raw)
    for raw in held[:6]:
        raw.send(wire.frame(wire.EXEC, command(b"cat", has_stdin=True).pack()))
        ((kind, payload),) = raw.frames()
        assert (kind, payload[0]) == (wire.EXITED, wire.REASONS.index("NOT_STARTED"))
        assert payload.endswith(b"cat: No space left on device")
    for raw in held[1:]:
        raw.close()
    assert run(tmp_path / "s", command(b"echo", b"on"))[0] == b"on\n"
    held[0].close()
    assert started.end() == 0


STOPPER = b"""
import os, select, signal
while not select.select([0], [], [], 0)[0]:
    try:
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:
        pass
"""


def test_a_child_that_is_stopped_on_its_way_holds_up_nothing(tmp_path: Path) -> None:
    """What one command does to all others must not freeze the first process, for it enforces their ends."""
    path = tmp_path / "s"
    started = Started(path, *NAMESPACES)
    stopper = Raw(path)
    request = command(b"python3", b"-c", STOPPER, has_stdin=True)
    request.timeout = 60.0
    stopper.send(wire.frame(wire.EXEC, request.pack()))
    assert stopper.frame() is not None
    others: list[Raw] = []
    begin = time.monotonic()
    while len(others) < 200 and time.monotonic() - begin < 3:
        others.append(Raw(path))
        others[-1].send(wire.frame(wire.EXEC, command(b"true").pack()))
        assert alive(path)
    stopper.send(wire.frame(wire.STDIN))
    assert stopper.frames()[-1][1][0] == wire.REASONS.index("EXITED")
    for raw in (stopper, *others):
        raw.close()
    assert run(path, command(b"echo", b"on"))[0] == b"on\n"
    assert started.end() == 0
