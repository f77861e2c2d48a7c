"""One connection of the daemon: frames in, frames out, never more in memory than one of each."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from sandboxd.guest import wire
from sandboxd.guest.loop import IN, OUT, Loop


class Operation:
    """What a connection is for; chosen by its first frame. This one is over: it lets all that comes fall."""

    def received(self, kind: int, payload: bytes) -> None:
        """Takes one more frame. Raises wire.Malformed."""
        if kind not in (wire.DATA, wire.STDIN, wire.SIGNAL, wire.RESIZE):
            raise wire.Malformed("a second operation on one connection")

    def drained(self) -> None:
        """All that was sent has left."""

    def closed(self) -> None:
        """The daemon has let go of the connection: end what it was for."""


class Peer:
    """Reads frames for its operation and sends what the operation says.

    `paused` stops reading; `want_drained` asks for `drained` calls whenever the socket takes more.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, begin: Callable[[Peer, int, bytes], Operation | None]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._begin = begin
        self._buffer = bytearray()
        self._pending = bytearray()
        self._mask = IN
        self.operation: Operation | None = None
        self.paused = False
        self.want_drained = False
        sock.setblocking(False)
        loop.watch(sock.fileno(), IN, self._ready)

    @property
    def congested(self) -> bool:
        """True while the daemon has not taken what was sent before."""
        return bool(self._pending)

    def send(self, data: bytes) -> None:
        """Sends now what the socket takes, the rest when it can."""
        if self._sock.fileno() < 0:
            return
        sent = 0
        if not self._pending:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                pass
            except OSError:
                return  # The hang-up is reported by epoll, and ends this connection there.
        if sent < len(data):
            self._pending += memoryview(data)[sent:]
        self.update()

    def update(self) -> None:
        """Makes the loop watch for what is wanted now."""
        if self._sock.fileno() < 0:
            return
        mask = (0 if self.paused else IN) | (OUT if self._pending or self.want_drained else 0)
        if mask != self._mask:
            self._mask = mask
            self._loop.watch(self._sock.fileno(), mask, self._ready)

    def close(self) -> None:
        """Ends the operation with the connection."""
        if self._sock.fileno() < 0:
            return
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        # No cycle of references: what an operation holds is freed with it, not when the collector comes by.
        operation, self.operation = self.operation, None
        if operation is not None:
            operation.closed()

    def _ready(self, mask: int) -> None:
        try:
            if mask & OUT:
                self._flush()
            if mask & IN and not self.paused:
                self._receive()
            elif mask & ~(IN | OUT) and self._hung_up():
                self.close()
        except (wire.Malformed, OSError):
            self.close()

    def _flush(self) -> None:
        if self._pending:
            try:
                del self._pending[: self._sock.send(self._pending)]
            except BlockingIOError:
                return
        if not self._pending and self.operation is not None:
            self.operation.drained()
        self.update()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(wire.PIECE)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self._buffer += data
        while not self.paused:
            found = wire.split(self._buffer, wire.MAX_REQUEST)
            if found is None:
                break
            if self.operation is None:
                self.operation = self._begin(self, *found)
            else:
                self.operation.received(*found)
        self.update()

    def resume(self) -> None:
        """Takes frames again, those that have come already first. Raises wire.Malformed."""
        self.paused = False
        while not self.paused and self.operation is not None:
            found = wire.split(self._buffer, wire.MAX_REQUEST)
            if found is None:
                break
            self.operation.received(*found)
        self.update()

    def _hung_up(self) -> bool:
        # The descriptor may be new since epoll spoke of its number: ask again.
        poll = select.poll()
        poll.register(self._sock.fileno(), 0)
        return bool(poll.poll(0))
