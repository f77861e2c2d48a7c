"""A socket of lines in a loop that must not wait: the launcher's to its daemons and to its sweeper."""

from __future__ import annotations

import socket

from sandboxd.backends.loop import GONE, IN, OUT, Loop

LINES_BYTES = 64 << 10

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Lines:
    """A socket of lines that never blocks: what the other side does not take yet waits here."""

    def __init__(
        self, loop: Loop, sock: socket.socket, heard: Callable[[bytes], None], ended: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._heard = heard
        self._ended = ended
        self._received = bytearray()
        self._pending = bytearray()
        sock.setblocking(False)
        loop.watch(sock.fileno(), IN, self._ready)

    def send(self, line: bytes) -> None:
        """Queues a line; one that is gone misses it."""
        if self._sock.fileno() >= 0:
            self._pending += line + b"\n"
            self._flush()

    def close(self) -> None:
        """As if the other side had gone."""
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._ended()

    def _ready(self, mask: int) -> None:
        if mask & OUT:
            self._flush()
        if mask & (IN | GONE):
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(LINES_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data:
            self.close()
            return
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            if self._sock.fileno() >= 0:  # One before it may have been the last that is heard.
                self._heard(bytes(line))

    def _flush(self) -> None:
        try:
            del self._pending[: self._sock.send(self._pending)]
        except BlockingIOError:
            pass
        except OSError:
            return  # Its end is reported to `_receive`.
        self._loop.watch(self._sock.fileno(), IN | OUT if self._pending else IN, self._ready)
