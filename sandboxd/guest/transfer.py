"""File operations as the daemon asks for them: which one a first frame begins, and its data in frames."""

from __future__ import annotations

import errno
import struct
from collections.abc import Generator

from sandboxd.guest import files, packing, wire
from sandboxd.guest.peer import Operation, Peer

# The rest of a longer one is cut off.
MESSAGE_BYTES = 1024
GIVERS = {wire.STAT: files.describe, wire.LIST: files.list_directory, wire.PACK: packing.pack}


def begin(peer: Peer, kind: int, payload: bytes) -> Operation:
    """Raises wire.Malformed for what is no file operation; what the system refuses the daemon is told."""
    try:
        return _begin(peer, kind, payload)
    except OSError as error:
        return failure(peer, error)


def _begin(peer: Peer, kind: int, payload: bytes) -> Operation:
    if kind == wire.WRITE:
        (mode,), path = _split(wire.WRITE_FIELDS, payload)
        return Receiver(peer, files.FileSink(path, mode))
    if kind == wire.UNPACK:
        return Receiver(peer, packing.Unpacker(_path(payload)))
    if kind == wire.READ:
        (offset, limit), path = _split(wire.READ_FIELDS, payload)
        return Sender(peer, files.read(path, offset, limit))
    if kind == wire.REMOVE:
        (recursive,), path = _split(wire.REMOVE_FIELDS, payload)
        return Sender(peer, files.remove(path, bool(recursive)))
    if kind in GIVERS:
        return Sender(peer, GIVERS[kind](_path(payload)))
    raise wire.Malformed(f"no operation begins with frame {kind}")


def _split(fields: struct.Struct, payload: bytes) -> tuple[tuple[int, ...], bytes]:
    if len(payload) < fields.size:
        raise wire.Malformed("a file request is too short")
    return fields.unpack_from(payload), _path(payload[fields.size :])


def _path(path: bytes) -> bytes:
    if not path:
        raise wire.Malformed("a file request without a path")
    if b"\0" in path:
        raise OSError(errno.EINVAL, "a path with a NUL byte")
    return path


def failure(peer: Peer, error: OSError) -> Operation:
    """Tells the daemon that the operation failed; what it still sends falls."""
    message = (error.strerror or str(error)).encode(errors="surrogateescape")[:MESSAGE_BYTES]
    peer.send(wire.frame(wire.ERROR, wire.ERROR_FIELDS.pack(error.errno or errno.EIO), message))
    return Operation()


class Receiver(Operation):
    """Takes data for a sink; an empty frame ends it, and the reply says how much there was."""

    def __init__(self, peer: Peer, sink: files.FileSink | packing.Unpacker) -> None:
        self._peer = peer
        self._sink = sink

    def received(self, kind: int, payload: bytes) -> None:
        if kind != wire.DATA:
            raise wire.Malformed("nothing but data may follow a file request")
        try:
            if payload:
                self._sink.feed(payload)
                return
            count = self._sink.finish()
        except OSError as error:
            self.closed()
            self._peer.operation = failure(self._peer, error)
            return
        self._peer.operation = Operation()
        self._peer.send(wire.frame(wire.DONE, wire.OFFSET.pack(count)))

    def closed(self) -> None:
        self._sink.abandon()


class Sender(Operation):
    """Sends a generator's pieces, each when the one before has left, and an empty one at the end."""

    def __init__(self, peer: Peer, pieces: Generator[bytes, None, None]) -> None:
        self._peer = peer
        self._pieces = pieces
        peer.want_drained = True

    def received(self, kind: int, payload: bytes) -> None:
        raise wire.Malformed("nothing may follow this request")

    def drained(self) -> None:
        try:
            piece = next(self._pieces, None)
        except OSError as error:
            self._peer.want_drained = False
            self._peer.operation = failure(self._peer, error)
            return
        if piece is None:
            self._peer.want_drained = False
        if piece != b"":
            self._peer.send(wire.frame(wire.DATA, piece or b""))

    def closed(self) -> None:
        self._pieces.close()
