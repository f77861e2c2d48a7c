"""One connection to a guest: how it is reached by a unix socket, and whole frames in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from sandboxd.guest import wire

RECEIVE_BYTES = 256 << 10
# The kernel's limit on a socket's path; longer ones go by a descriptor of their directory.
SOCKET_PATH_BYTES = 107


async def dial(path: Path) -> socket.socket:
    """A connected, non-blocking unix socket. Raises OSError."""
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


def _connect(sock: socket.socket, path: Path) -> None:
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        sock.connect(os.fspath(path))
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


class Broken(Exception):
    """The connection ended in the middle of an operation."""


class Channel:
    """One connection: whole frames in both directions, memory bounded by the largest frame."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """Raises Broken."""
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as error:
            raise Broken(error.strerror) from error

    def tell(self, data: bytes) -> None:
        """Sends a few bytes if they are taken at once: for the last word before `close`."""
        with contextlib.suppress(OSError):
            self._sock.send(data)

    async def frame(self) -> tuple[int, bytes]:
        """The next frame. Raises Broken, wire.Malformed."""
        while True:
            found = wire.split(self._buffer, wire.MAX_REPLY)
            if found is not None:
                return found
            try:
                data = await self._loop.sock_recv(self._sock, RECEIVE_BYTES)
            except OSError as error:
                raise Broken(error.strerror) from error
            if not data:
                raise Broken("the guest closed the connection")
            self._buffer += data

    def close(self) -> None:
        """Idempotent."""
        # The loop would otherwise keep what waits on the number of a descriptor that is somebody else's.
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
