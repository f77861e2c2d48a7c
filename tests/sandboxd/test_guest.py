"""The guest without a sandbox around it, and guests that lie: frames out of place, endless, or too large."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.backends.connection import GuestConnection
from sandboxd.errors import InvalidRequest, SandboxLost
from sandboxd.guest import wire
from sandboxd.types import Command, Started, Stdout, Template

from .backend_kit import execute, pieces, read, shell

pytestmark = pytest.mark.anyio
PACKAGE_ROOT = Path(wire.__file__).parent.parent.parent
SERVE = """
import signal, socket, sys, types
package = sys.modules["sandboxd"] = types.ModuleType("sandboxd")
package.__path__ = [sys.argv[1] + "/sandboxd"]
from sandboxd.guest.main import Guest, lock_down
from sandboxd.guest.memory import Memory
listener = socket.socket(fileno=int(sys.argv[2]))
lock_down()
Guest(listener, Memory()).serve()
"""


def listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(64)
    return sock


@contextlib.asynccontextmanager
async def guest(directory: Path, python: str = sys.executable) -> AsyncIterator[GuestConnection]:
    """A real guest as a plain process."""
    path = directory / "s"
    with listen(path) as sock:
        arguments = [python, "-I", "-S", "-c", SERVE, str(PACKAGE_ROOT), str(sock.fileno())]
        process = subprocess.Popen(arguments, pass_fds=[sock.fileno()], env={})  # noqa: ASYNC220
    connection = GuestConnection("plain", path, Template("t", cwd=os.fsencode(directory)))
    try:
        yield connection
    finally:
        await connection.close()
        process.send_signal(signal.SIGTERM)
        # A second signal may meet the interpreter on its way out.
        assert process.wait(10) in (0, -signal.SIGTERM)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


async def test_a_guest_needs_nothing_but_a_socket(directory: Path) -> None:
    async with guest(directory) as box:
        await box.ping()
        assert (await shell(box, "echo $PPID; pwd")).stdout.endswith(os.fsencode(directory) + b"\n")
        await box.files.write(b"f", pieces(b"abc"), 0o600)
        assert await read(box, b"f") == b"abc"


async def test_its_end_is_noticed_by_who_watches(directory: Path) -> None:
    async with guest(directory) as box:
        watching = asyncio.create_task(box.wait_lost())
        pid = int((await shell(box, "echo $PPID")).stdout)
        os.kill(pid, signal.SIGTERM)
        assert "cannot be reached" in await asyncio.wait_for(watching, 10)
        with pytest.raises(SandboxLost):
            await box.ping()


async def test_files_that_would_hold_it_up_are_refused(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    async with guest(directory) as box:
        with pytest.raises(Exception, match="not a regular file"):
            await read(box, b"pipe")
        with pytest.raises(Exception, match="not a regular file"):
            await read(box, b"/dev/zero")


async def test_no_descriptor_is_left_behind(directory: Path) -> None:
    async with guest(directory) as box:
        pid = (await shell(box, "echo $PPID")).stdout.decode().strip()

        async def descriptors() -> int:
            # Its own connection is one of them each time.
            return len(list(Path(f"/proc/{pid}/fd").iterdir()))

        await box.ping()
        before = await descriptors()
        for n in range(20):
            await execute(box, Command(argv=(b"true",), stdin=b"x" * (n * 10_000)))
            await execute(box, Command(argv=(b"no-such-program",), stdin=b"x"))
            with contextlib.suppress(Exception):
                await read(box, b"missing")
            async with box.exec(Command(argv=(b"sleep", b"9"))) as events:
                await anext(aiter(events))
        await box.ping()
        assert await descriptors() <= before + 1


@pytest.mark.parametrize(
    "command",
    [Command(argv=()), Command(argv=(b"a\0b",)), Command(argv=(b"true", b"x" * (5 << 20)))],
    ids=["empty", "nul", "huge"],
)
async def test_what_no_kernel_takes_is_the_callers_fault(directory: Path, command: Command) -> None:
    async with guest(directory) as box:
        with pytest.raises(InvalidRequest):
            await execute(box, command)
        await box.ping()


async def test_a_ping_leaves_a_connection_for_the_next_operation(directory: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with guest(directory) as box:
        before = descriptors()
        await box.ping()
        assert descriptors() == before + 1
        assert (await shell(box, "echo first")).stdout == b"first\n"
        assert descriptors() == before
        assert (await shell(box, "echo second")).stdout == b"second\n"
        await box.ping()
        await box.close()
        assert descriptors() == before


# -- guests that lie


@contextlib.asynccontextmanager
async def liar(directory: Path, answer: Callable[[socket.socket], None]) -> AsyncIterator[GuestConnection]:
    """A connection to something that answers each connection with `answer`, in a process of its own."""
    path = directory / "s"
    sock = listen(path)
    pid = os.fork()
    if pid == 0:
        try:
            while True:
                connection, _ = sock.accept()
                with contextlib.suppress(OSError):
                    connection.recv(65536)
                    answer(connection)
                    connection.recv(1)
                connection.close()
        finally:
            os._exit(0)
    sock.close()
    box = GuestConnection("liar", path, Template("t"))
    try:
        yield box
    finally:
        await box.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222


STARTED = wire.frame(wire.STARTED, b"\0\0\0\1")


def _exit(reason: int) -> bytes:
    return wire.frame(wire.EXITED, wire.EXITED_FIELDS.pack(reason, 0, 0, 0.0, 0.0))


def _output(offset: int) -> bytes:
    return wire.frame(wire.STDOUT, wire.OFFSET.pack(offset), b"data")


LIES = {
    "a huge length": struct.pack("!BI", wire.STDOUT, 0xFFFFFFFF),
    "an unknown frame": wire.frame(255, b"?"),
    "a gap": STARTED + _output(0) + _output(5),
    "output before the start": _output(0),
    "two starts": STARTED + STARTED,
    "an end before the start": _exit(0),
    "an end of no kind": STARTED + _exit(77),
    "started and not": STARTED + _exit(wire.REASONS.index("NOT_STARTED")),
    "a short end": STARTED + wire.frame(wire.EXITED, b"x"),
    "an empty output": STARTED + wire.frame(wire.STDOUT, wire.OFFSET.pack(0)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_guest_that_breaks_the_protocol_loses_its_sandbox(directory: Path, lie: bytes) -> None:
    async with liar(directory, lambda connection: connection.sendall(lie)) as box:
        with pytest.raises(SandboxLost, match="broke the protocol"):
            await execute(box, Command(argv=(b"true",)))
        with pytest.raises(SandboxLost):
            await box.ping()


async def test_a_guest_that_answers_files_with_nonsense(directory: Path) -> None:
    async with liar(directory, lambda connection: connection.sendall(STARTED)) as box:
        with pytest.raises(SandboxLost):
            await read(box, b"f")
    (directory / "s").unlink()
    async with liar(directory, lambda connection: connection.sendall(STARTED)) as box:
        with pytest.raises(SandboxLost):
            await box.files.write(b"f", pieces(b"x"), 0o644)


async def test_more_of_a_file_than_was_asked_for(directory: Path) -> None:
    data = wire.frame(wire.DATA, b"x" * 100)
    async with liar(directory, lambda connection: connection.sendall(data)) as box:
        with pytest.raises(SandboxLost, match="more of a file"):
            await read(box, b"f", limit=10)


async def test_an_endless_printer_waits_for_its_reader(directory: Path) -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(STARTED)
        block = b"y" * 65536
        for n in range(10**9):
            connection.sendall(wire.frame(wire.STDOUT, wire.OFFSET.pack(n * len(block)), block))

    async with liar(directory, flood) as box, box.exec(Command(argv=(b"yes",))) as events:
        assert isinstance(await anext(aiter(events)), Started)
        async with asyncio.timeout(10):
            for _ in range(50):
                assert isinstance(await anext(aiter(events)), Stdout)


async def test_a_guest_that_hangs_up_is_lost(directory: Path) -> None:
    async with liar(directory, lambda connection: connection.shutdown(socket.SHUT_RDWR)) as box:
        with pytest.raises(SandboxLost, match="cannot be reached"):
            await execute(box, Command(argv=(b"true",)))


# -- frames


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300))), st.integers(1, 50))
def test_frames_come_out_as_they_went_in(frames: list[tuple[int, bytes]], step: int) -> None:
    sent = b"".join(wire.frame(kind, payload) for kind, payload in frames)
    buffer, got = bytearray(), []
    for start in range(0, len(sent), step):
        buffer += sent[start : start + step]
        while (found := wire.split(buffer, 300)) is not None:
            got.append(found)
    assert got == frames
    assert not buffer


@given(
    st.lists(st.binary(max_size=50), min_size=1),
    st.binary(),
    st.lists(st.tuples(st.binary(), st.binary())),
)
def test_requests_come_out_as_they_went_in(
    argv: list[bytes], cwd: bytes, env: list[tuple[bytes, bytes]]
) -> None:
    request = wire.ExecRequest(argv, cwd, env)
    request.timeout, request.output_limit, request.has_stdin = 1.5, 7, True
    again = wire.ExecRequest.unpack(request.pack())
    assert (again.argv, again.cwd, again.env) == (argv, cwd, env)
    assert (again.timeout, again.output_limit, again.has_stdin) == (1.5, 7, True)


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_malformed(data: bytes) -> None:
    with contextlib.suppress(wire.Malformed):
        wire.ExecRequest.unpack(data)
