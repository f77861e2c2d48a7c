"""One connection to a guest: how it is reached by a unix socket, and whole frames in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path

from sandboxd.addresses import PATH_BYTES_LIMIT
from sandboxd.guest import wire

# So much is asked for at once; first less, for most commands print little, and room that is not used costs.
RECEIVE_BYTES, FIRST_RECEIVE_BYTES = 256 << 10, 16 << 10
# Kind, length and offset.
OUTPUT_HEAD = struct.Struct("!BIQ")
# The head of the frame that tells of a command's start, and all its bytes.
START, START_BYTES = wire.HEADER.pack(wire.STARTED, 4), wire.HEADER.size + 4


async def dial(path: Path | str) -> socket.socket:
    """A connected, non-blocking unix socket. Raises OSError."""
    path = os.fspath(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                _connect(sock, path)
                return sock
            except BlockingIOError:
                # The listener's queue is full, and the kernel has no event for its end.
                await asyncio.sleep(0.001)
    except BaseException:
        sock.close()
        raise


def _connect(sock: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) <= PATH_BYTES_LIMIT:
        sock.connect(path)
        return
    # Longer ones go by a descriptor of their directory.
    parent, _, name = path.rpartition("/")
    directory = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{directory}/{name}")
    finally:
        os.close(directory)


class Broken(Exception):
    """The connection ended in the middle of an operation."""


class Channel:
    """One connection: whole frames in both directions, memory bounded by the largest frame and one receipt.

    The loop watches the socket from the first wait on, and as long as somebody waits when something comes:
    what comes while nobody does is left in the socket, whose other end then has to wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._room = FIRST_RECEIVE_BYTES
        self._late = False
        self._halfway = False
        self._watched = False
        self._waiter: asyncio.Future[None] | None = None
        self._passes_start = False
        self._loop = asyncio.get_running_loop()

    def may_be_kept(self) -> bool:
        """Whether another operation may follow: all that came was taken, and all that was begun was sent."""
        self._room = FIRST_RECEIVE_BYTES
        return not (self._buffer or self._halfway or self._late)

    async def send(self, data: bytes) -> None:
        """Raises Broken."""
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise Broken(error.strerror) from error
        if sent == len(data):
            return
        self._halfway = True
        try:
            await self._loop.sock_sendall(self._sock, memoryview(data)[sent:])
        except OSError as error:
            raise Broken(error.strerror) from error
        self._halfway = False

    def tell(self, data: bytes) -> None:
        """Sends a few bytes if they are taken at once: for the last word before `close`."""
        with contextlib.suppress(OSError):
            self._sock.send(data)

    async def frame(self, patience: float | None = None, *, passes_start: bool = False) -> tuple[int, bytes]:
        """The next frame. Raises Broken, wire.Malformed, and TimeoutError when there was none for `patience`
        seconds: of a frame that comes later nobody hears. With `passes_start` the start of a command may be
        told with what follows it: one wait less.
        """
        found = self.arrived()
        if found is not None:
            return found
        # Less than what a task's own timeout costs.
        timer = None if patience is None else self._loop.call_later(patience, self._give_up)
        self._passes_start = passes_start
        try:
            while True:
                # Where one receipt has brought all that fits, there is more.
                if self._room == FIRST_RECEIVE_BYTES or not self._receive():
                    await self._readable()
                found = self.arrived()
                if found is not None:
                    return found
        finally:
            if timer is not None:
                timer.cancel()

    def arrived(self) -> tuple[int, bytes] | None:
        """The next frame if it is there. Raises wire.Malformed."""
        return wire.split(self._buffer, wire.MAX_REPLY) if self._buffer else None

    def arrived_output(self, kind: int, offset: int) -> bytes | None:
        """The payload of the next frame if it is there, and is more output of this kind at this offset."""
        buffer = self._buffer
        if len(buffer) <= OUTPUT_HEAD.size or buffer[0] != kind:
            return None
        _, length, begin = OUTPUT_HEAD.unpack_from(buffer)
        if begin != offset or length <= wire.OFFSET.size:
            return None
        found = wire.split(buffer, wire.MAX_REPLY)
        return None if found is None else found[1]

    async def _readable(self) -> None:
        """Returns when something was received."""
        waiter = self._waiter = self._loop.create_future()
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._sock, self._ready)
        try:
            await waiter
        finally:
            self._waiter = None

    def _ready(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._watched = False
            self._loop.remove_reader(self._sock)
            return
        try:
            if self._receive() and not (self._passes_start and self._has_only_start()):
                waiter.set_result(None)
        except (Broken, TimeoutError) as error:
            waiter.set_exception(error)

    def _has_only_start(self) -> bool:
        return len(self._buffer) == START_BYTES and self._buffer.startswith(START)

    def _receive(self) -> bool:
        """Takes what is there; False where there is nothing. Raises as `frame`."""
        try:
            data = self._sock.recv(self._room)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise Broken(error.strerror) from error
        if self._late:
            raise TimeoutError
        if not data:
            raise Broken("the guest closed the connection")
        if len(data) == self._room:
            self._room = RECEIVE_BYTES
        self._buffer += data
        return True

    def _give_up(self) -> None:
        self._late = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        # The loop would otherwise keep what waits on the number of a descriptor that is somebody else's.
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._sock.close()
