"""What the daemon makes of a guest's frames: how they are read, and which of them become one event."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from sandboxd.backends.channel import Broken, Channel
from sandboxd.backends.guest_execution import PIECES_BYTES, GuestExecution
from sandboxd.errors import Phase, SandboxLost
from sandboxd.guest import wire
from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout

pytestmark = pytest.mark.anyio

STARTED = wire.frame(wire.STARTED, b"\0\0\0\1")
EXITED = wire.frame(wire.EXITED, wire.EXITED_FIELDS.pack(0, 0, 0, 0.5, 0.25))
END = Exited(ExitReason.EXITED, wall=0.5, cpu=0.25)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


Ends = tuple[socket.socket, socket.socket]


def output(kind: int, offset: int, data: bytes) -> bytes:
    return wire.frame(kind, wire.OFFSET.pack(offset), data)


async def events(ends: Ends, frames: bytes, command: Command) -> list[Event]:
    """What is told of a command whose guest has sent all its frames before the first is read."""

    async def cause(error: Broken | wire.Malformed, phase: Phase) -> SandboxLost:
        return SandboxLost(str(error), phase=phase)

    ours, theirs = ends
    theirs.sendall(frames)
    with contextlib.closing(Channel(ours)) as channel:
        async with asyncio.timeout(20):
            return [event async for event in GuestExecution(channel, cause, command)]


async def test_output_that_is_there_together_is_one_event(ends: Ends) -> None:
    frames = (
        STARTED
        + b"".join(output(wire.STDOUT, 2 * n, b"%02d" % n) for n in range(10))
        + output(wire.STDERR, 0, b"e")
        + output(wire.STDOUT, 20, b"!")
        + EXITED
    )
    told = await events(ends, frames, Command((b"x",)))
    all_of_it = b"".join(b"%02d" % n for n in range(10))
    assert told == [Started(), Stdout(all_of_it, 0), Stderr(b"e", 0), Stdout(b"!", 20), END]


async def test_a_hole_lies_between_two_events(ends: Ends) -> None:
    frames = STARTED + output(wire.STDOUT, 0, b"ab") + output(wire.STDOUT, 7, b"cd") + EXITED
    told = await events(ends, frames, Command((b"x",), id="named"))
    assert told == [Started(), Stdout(b"ab", 0), Stdout(b"cd", 7), END]


async def test_an_event_stays_bounded(ends: Ends) -> None:
    piece = bytes(wire.PIECE)
    count = 3 * PIECES_BYTES // wire.PIECE
    frames = b"".join(output(wire.STDOUT, n * wire.PIECE, piece) for n in range(count))
    ours, theirs = ends
    sending = asyncio.create_task(asyncio.to_thread(theirs.sendall, frames + EXITED))
    told = await events((ours, theirs), STARTED, Command((b"x",)))
    await sending
    sizes = [len(event.data) for event in told if isinstance(event, Stdout)]
    assert sum(sizes) == len(piece) * count
    assert max(sizes) <= PIECES_BYTES


@pytest.mark.parametrize(
    "bad",
    [
        output(wire.STDOUT, 1, b"x"),
        output(wire.STDOUT, 2, b""),
        wire.frame(wire.STDOUT),
        # Its own length, and what looks like the next offset behind it.
        wire.frame(wire.STDOUT) + wire.OFFSET.pack(2) + b"more",
        output(wire.STDOUT, 2, bytes(9)),
        wire.HEADER.pack(wire.STDOUT, wire.MAX_REPLY + 1) + wire.OFFSET.pack(2) + b"x",
    ],
    ids=["again", "no bytes", "no offset", "a false offset", "past the limit", "too long"],
)
async def test_no_output_hides_behind_what_came_before(ends: Ends, bad: bytes) -> None:
    frames = STARTED + output(wire.STDOUT, 0, b"ab") + bad
    with pytest.raises(SandboxLost):
        await events(ends, frames, Command((b"x",), output_limit=10))


async def test_a_frame_is_waited_for_so_long_and_no_longer(ends: Ends) -> None:
    ours, theirs = ends
    channel = Channel(ours)
    theirs.sendall(STARTED)
    async with asyncio.timeout(20):
        assert await channel.frame(19.0) == (wire.STARTED, b"\0\0\0\1")
        with pytest.raises(TimeoutError):
            await channel.frame(0.001)
    channel.close()


async def test_half_a_frame_is_none(ends: Ends) -> None:
    ours, theirs = ends
    channel = Channel(ours)
    theirs.sendall(STARTED[:-1])
    reading = asyncio.create_task(channel.frame())
    theirs.sendall(STARTED[-1:] + EXITED[:3])
    async with asyncio.timeout(20):
        assert (await reading)[0] == wire.STARTED
        theirs.close()
        with pytest.raises(Broken):
            await channel.frame()
    channel.close()


async def test_a_start_of_which_nobody_must_hear_at_once_comes_with_what_follows(ends: Ends) -> None:
    ours, theirs = ends
    channel, first = Channel(ours), wire.frame(wire.ERROR, wire.ERROR_FIELDS.pack(125))
    async with asyncio.timeout(20):
        waiting = asyncio.ensure_future(channel.frame(passes_start=True))
        await asyncio.sleep(0)
        theirs.sendall(STARTED)
        theirs.sendall(EXITED)
        assert (await waiting)[0] == wire.STARTED
        assert (await channel.frame(passes_start=True))[0] == wire.EXITED
        # What is as long is told at once.
        theirs.sendall(first)
        assert (await channel.frame(passes_start=True))[0] == wire.ERROR
    channel.close()


async def test_a_start_alone_does_not_end_what_is_waited_for(ends: Ends) -> None:
    ours, theirs = ends
    channel = Channel(ours)
    theirs.sendall(STARTED)
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            await channel.frame(0.2, passes_start=True)
    channel.close()
