"""Files read and written for the daemon, with the sandbox's own rights and inside its own root."""

from __future__ import annotations

import errno
import os
import stat

from sandboxd.guest import wire
from sandboxd.guest.peer import Operation, Peer


def failure(peer: Peer, error: OSError) -> Operation:
    """Tells the daemon that the operation failed; what it still sends falls."""
    message = (error.strerror or str(error)).encode()
    peer.send(wire.frame(wire.ERROR, wire.ERROR_FIELDS.pack(error.errno or errno.EIO), message))
    return Operation()


class Writer(Operation):
    """Fills a new file beside the target and renames it over the target when all of it has come."""

    def __init__(self, peer: Peer, path: bytes, mode: int) -> None:
        self._peer = peer
        self._path = path
        self._mode = mode
        self._size = 0
        parent, name = os.path.split(path)
        if not name or os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.makedirs(parent, mode=0o755, exist_ok=True)
        self._partial: bytes | None = os.path.join(parent, b"." + os.urandom(8).hex().encode() + b".partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._partial, flags, 0o600)

    def received(self, kind: int, payload: bytes) -> None:
        if kind != wire.DATA:
            raise wire.Malformed("nothing but data may follow a file request")
        if self._partial is None:
            return
        try:
            if payload:
                self._write(payload)
            else:
                self._commit()
        except OSError as error:
            self.closed()
            self._peer.operation = failure(self._peer, error)

    def _write(self, payload: bytes) -> None:
        view = memoryview(payload)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]

    def _commit(self) -> None:
        os.fchmod(self._fd, self._mode & 0o7777)
        if self._partial is not None:
            os.rename(self._partial, self._path)
        self._partial = None
        os.close(self._fd)
        self._peer.send(wire.frame(wire.DONE, wire.OFFSET.pack(self._size)))

    def closed(self) -> None:
        """Takes an unfinished file away."""
        if self._partial is not None:
            os.close(self._fd)
            os.unlink(self._partial)
            self._partial = None


class Reader(Operation):
    """Sends a file in pieces, each when the one before has left."""

    def __init__(self, peer: Peer, path: bytes, offset: int, limit: int) -> None:
        self._peer = peer
        self._left = limit
        # Without O_NONBLOCK a named pipe would hold up the whole guest.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(self._fd).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "not a regular file")
            os.lseek(self._fd, offset, os.SEEK_SET)
        except BaseException:
            os.close(self._fd)
            raise
        peer.want_drained = True

    def received(self, kind: int, payload: bytes) -> None:
        raise wire.Malformed("nothing may follow a read request")

    def drained(self) -> None:
        size = wire.PIECE if self._left < 0 else min(wire.PIECE, self._left)
        try:
            piece = os.read(self._fd, size)
        except OSError as error:
            self._peer.want_drained = False
            self.closed()
            self._peer.operation = failure(self._peer, error)
            return
        if self._left >= 0:
            self._left -= len(piece)
        if not piece:
            self._peer.want_drained = False
        self._peer.send(wire.frame(wire.DATA, piece))

    def closed(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
