"""The guest without a sandbox around it, and guests that lie: frames out of place, endless, or too large."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.backends.connection import GuestConnection
from sandboxd.errors import InvalidRequest, SandboxLost
from sandboxd.guest import wire
from sandboxd.guest.replay import Replay
from sandboxd.types import Command, Started, Stdout, Template

from . import wire_kit
from .backend_kit import execute, pieces, read, shell
from .guest_kit import guest, listen

pytestmark = pytest.mark.anyio


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
        assert "cannot be reached" in await asyncio.wait_for(watching, 20)
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


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_ping_leaves_a_connection_for_the_operations_that_follow(directory: Path) -> None:
    async with guest(directory) as box:
        before = descriptors()
        await box.ping()
        assert descriptors() == before + 1
        assert (await shell(box, "echo first")).stdout == b"first\n"
        # Two at once need two, of which one is kept.
        await asyncio.gather(shell(box, "echo second"), shell(box, "echo third"))
        async with box.exec(Command((b"true",), id="named", resumable=True)) as events:
            assert [type(event).__name__ async for event in events] == ["Started", "Exited"]
        assert descriptors() == before + 1
        await box.ping()
        await box.close()
        assert descriptors() == before


async def test_what_was_cut_off_is_not_followed_by_anything(directory: Path) -> None:
    """Neither a command that goes on, nor input of which a part was sent."""
    async with guest(directory) as box:
        await box.ping()
        before = descriptors()
        async with box.exec(Command((b"sleep", b"1000"))) as events:
            await anext(aiter(events))
        assert descriptors() == before - 1
        await box.ping()
        assert (await execute(box, Command((b"true",), stdin=b"x" * 3_000_000))).code == 0
        assert (await shell(box, "cat", stdin=b"y" * 3_000_000)).stdout == b"y" * 3_000_000
        assert descriptors() <= before


async def test_a_guest_that_keeps_no_connection_is_given_a_new_one(directory: Path) -> None:
    """One of an older version, that is: it says nothing back to a ping."""
    connections = 0

    def answer(connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            connection.sendall(wire.frame(wire.PING))
            connection.recv(65536)
        connection.sendall(STARTED + _exit(0))

    async with liar(directory, answer) as box:
        await box.ping()
        assert [(await execute(box, Command((b"true",)))).code for _ in range(2)] == [0, 0]
    assert connections == 2


async def test_a_kept_connection_ends_with_its_guest(directory: Path) -> None:
    async with guest(directory) as box:
        await box.ping()
        pid = int((await shell(box, "echo $PPID")).stdout)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(SandboxLost):
            while True:
                await shell(box, "true")


async def test_what_named_commands_print_takes_bounded_memory(directory: Path) -> None:
    """Though each of a hundred leaves 2 MiB, and nobody collects garbage."""
    script = b"head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2"
    async with guest(directory) as box:
        pid = (await shell(box, "echo $PPID")).stdout.decode().strip()
        for n in range(100):
            async with box.exec(Command((b"sh", b"-c", script), id=f"c{n}")) as events:
                async for _ in events:
                    pass
        known = await box.commands.known()
        assert [info.id for info in known] == [f"c{n}" for n in range(92, 100)]
        assert sum(kept.end - kept.begin for info in known for kept in (info.stdout, info.stderr)) == 16 << 20
        status = Path(f"/proc/{pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        assert int(resident.split()[1]) < 64 << 10


# -- guests that lie


@contextlib.asynccontextmanager
async def liar(directory: Path, answer: Callable[[socket.socket], None]) -> AsyncIterator[GuestConnection]:
    """A connection to something that answers each connection with `answer`, in a thread of its own: a fork of
    a process in which gRPC has threads may never come to an end.
    """
    path = directory / "s"
    sock = listen(path)
    open_ones: list[socket.socket] = [sock]

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = sock.accept()
                open_ones.append(connection)
                with contextlib.suppress(OSError):
                    connection.recv(65536)
                    answer(connection)
                    connection.recv(1)
                connection.close()

    thread = threading.Thread(target=serve, name="liar")
    thread.start()
    box = GuestConnection("liar", path, Template("t"))
    try:
        yield box
    finally:
        await box.close()
        for each in reversed(open_ones):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(thread.join)
        sock.close()


STARTED = wire.frame(wire.STARTED, b"\0\0\0\1")


def _exit(reason: int) -> bytes:
    return wire.frame(wire.EXITED, wire.EXITED_FIELDS.pack(reason, 0, 0, 0.0, 0.0))


def _output(offset: int) -> bytes:
    return wire.frame(wire.STDOUT, wire.OFFSET.pack(offset), b"data")


def _listed(*kept: int, name: bytes = b"it") -> bytes:
    return wire.frame(wire.DATA, wire.NamedInfo(name, kept, running=True).pack())


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


ATTACHED_LIES = {
    "output from before": STARTED + _output(99),
    "output again": STARTED + _output(100) + _output(103),
    "an offset beyond all": STARTED + _output((1 << 63) - 2),
    "a refusal after the start": STARTED + wire.frame(wire.ERROR, wire.ERROR_FIELDS.pack(2)),
    "a refusal without a number": wire.frame(wire.ERROR),
    "a refusal of another kind": wire.frame(wire.ERROR, wire.ERROR_FIELDS.pack(5)),
}
LISTED_LIES = {
    "another frame": STARTED,
    "half of one": wire.frame(wire.DATA, b"half"),
    "a name that is cut": wire.frame(wire.DATA, wire.NAMED_INFO_FIELDS.pack(1, 0, 0, 0, 0, 9) + b"it"),
    "an end before the beginning": _listed(0, 0, 2, 1),
    "an offset beyond all": _listed(0, 1 << 63, 0, 0),
    "a name that is none": _listed(0, 0, 0, 0, name=b"\xff"),
    "no name": _listed(0, 0, 0, 0, name=b""),
    "more than there can be": _listed(0, 0, 0, 0) * 20_001,
}


@pytest.mark.parametrize("lie", ATTACHED_LIES.values(), ids=ATTACHED_LIES.keys())
async def test_a_guest_that_lies_about_a_named_command(directory: Path, lie: bytes) -> None:
    async with liar(directory, lambda connection: connection.sendall(lie)) as box:
        with pytest.raises(SandboxLost, match="broke the protocol"):
            async with box.commands.attach("it", stdout_offset=100) as events:
                async for _ in events:
                    pass
        with pytest.raises(SandboxLost):
            await box.commands.forget("it")


@pytest.mark.parametrize("lie", LISTED_LIES.values(), ids=LISTED_LIES.keys())
async def test_a_guest_that_lists_what_cannot_be(directory: Path, lie: bytes) -> None:
    async with liar(directory, lambda connection: connection.sendall(lie)) as box:
        with pytest.raises(SandboxLost, match="broke the protocol"):
            await box.commands.known()


async def test_a_guest_that_answers_a_signal_with_nonsense(directory: Path) -> None:
    async with liar(directory, lambda connection: connection.sendall(STARTED)) as box:
        with pytest.raises(SandboxLost, match="broke the protocol"):
            await box.commands.signal("it", 9)


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
        async with asyncio.timeout(20):
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
    again = wire_kit.unpack_exec(request.pack())
    assert (again.argv, again.cwd, again.env) == (argv, cwd, env)
    assert (again.timeout, again.output_limit, again.has_stdin) == (1.5, 7, True)


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_malformed(data: bytes) -> None:
    for unpack in (wire.NamedInfo.unpack_all, wire.Info.unpack_all):
        with contextlib.suppress(wire.Malformed):
            unpack(data)


@given(st.binary(max_size=255), st.binary(), st.integers(0, 255), st.lists(st.binary(), min_size=1))
def test_named_requests_come_out_as_they_went_in(
    name: bytes, stdin: bytes, bond: int, argv: list[bytes]
) -> None:
    request = wire.NamedRequest(name, wire.ExecRequest(argv, b"/", []), stdin, bond)
    again = wire_kit.unpack_named(request.pack())
    assert (again.id, again.stdin, again.bond) == (name, stdin, bond)
    assert again.command.argv == argv


# -- what is kept of a stream


@given(st.integers(1, 400), st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=150))))
def test_a_replay_holds_the_last_bytes_at_their_offsets(limit: int, added: list[tuple[int, bytes]]) -> None:
    """Against a dictionary of all bytes by their offsets; the first number of a pair is a hole before it."""
    replay, all_bytes = Replay(limit), dict[int, int]()
    for hole, data in added:
        offset = replay.end + hole
        replay.add(offset, data)
        all_bytes.update(enumerate(data, offset))
    kept = sorted(all_bytes)[-limit:]
    assert replay.held == len(kept)
    assert (replay.begin, replay.end) == ((kept[0], kept[-1] + 1) if kept else (0, 0))
    for start in (0, replay.begin, replay.begin + 1, replay.end - 1, replay.end):
        seen, position = dict[int, int](), max(start, 0)
        while (found := replay.after(position)) is not None:
            assert found[1]
            assert found[0] >= position
            seen.update(enumerate(found[1], found[0]))
            position = found[0] + len(found[1])
        assert seen == {offset: all_bytes[offset] for offset in kept if offset >= start}
