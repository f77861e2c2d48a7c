"""Files as the guest handles them, for the fake backend and the client: in steps short enough for a loop.

What gives data is a generator: an empty piece means that there is nothing to send yet. What takes data is a
sink: `feed` as often as needed, then `finish`, which returns a count, or `abandon`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator

from sandboxd.guest import wire

# So many files are removed in one step.
REMOVED_AT_ONCE = 128
KINDS = {stat.S_IFREG: wire.REGULAR, stat.S_IFDIR: wire.DIRECTORY, stat.S_IFLNK: wire.SYMLINK}


def write_all(fd: int, data: bytes) -> None:
    """Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def make_directories(path: bytes) -> None:
    """As `os.makedirs` with `exist_ok`, which goes no deeper than Python's own stack. Raises OSError."""
    missing = [path]
    while (above := os.path.dirname(missing[-1].rstrip(b"/"))) and not os.path.exists(above):
        missing.append(above)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o755)
        except OSError:
            # Not only where it is there: a file system that is read-only refuses before it looks.
            if not os.path.isdir(directory):
                raise


class FileSink:
    """Fills a new file beside the target and renames it over the target when all of it has come."""

    def __init__(self, path: bytes, mode: int) -> None:
        self._path = path
        self._mode = mode
        self._size = 0
        parent, name = os.path.split(path)
        if not name or os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        make_directories(parent)
        self._partial = os.path.join(parent, b"." + os.urandom(8).hex().encode() + b".partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._partial, flags, 0o600)

    def feed(self, data: bytes) -> None:
        """Raises OSError."""
        write_all(self._fd, data)
        self._size += len(data)

    def finish(self) -> int:
        """Returns the file's size. Raises OSError."""
        os.fchmod(self._fd, self._mode & 0o7777)
        os.rename(self._partial, self._path)
        fd, self._fd = self._fd, -1
        os.close(fd)
        return self._size

    def abandon(self) -> None:
        """Takes an unfinished file away. Idempotent, and no error: its directory may be gone by now."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            try:
                os.unlink(self._partial)
            except OSError:
                return


def read(path: bytes, offset: int, limit: int) -> Generator[bytes, None, None]:
    """The bytes of a regular file from `offset`; no more than `limit`, unless that is -1. Raises OSError."""
    # Without O_NONBLOCK a named pipe would hold up the whole guest.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file")
        os.lseek(fd, offset, os.SEEK_SET)
        left = limit
        while piece := os.read(fd, wire.PIECE if left < 0 else min(wire.PIECE, left)):
            left -= len(piece) if left >= 0 else 0
            yield piece
    finally:
        os.close(fd)


def describe(path: bytes) -> Generator[bytes, None, None]:
    """What is at `path`, not followed if it is a link: one packed `wire.Info`. Raises OSError."""
    path = _without_slash(path)
    yield _info(path, os.path.basename(path)).pack()


def list_directory(path: bytes) -> Generator[bytes, None, None]:
    """What a directory holds, sorted by name: packed `wire.Info`s, whole in each piece. Raises OSError."""
    piece = b""
    for name in sorted(os.listdir(path)):
        try:
            piece += _info(os.path.join(path, name), name).pack()
        except FileNotFoundError:
            continue  # removed since
        if len(piece) > wire.PIECE:
            yield piece
            piece = b""
    yield piece


def _info(path: bytes, name: bytes) -> wire.Info:
    status = os.lstat(path)
    kind = KINDS.get(stat.S_IFMT(status.st_mode), wire.OTHER)
    target = os.readlink(path) if kind == wire.SYMLINK else b""
    return wire.Info(kind, stat.S_IMODE(status.st_mode), status.st_size, status.st_mtime_ns, name, target)


def remove(path: bytes, recursive: bool) -> Generator[bytes, None, None]:
    """Removes a file, a link, or a directory, with all it holds if `recursive`. Raises OSError."""
    path = _without_slash(path)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    if not recursive:
        os.rmdir(path)
        return
    stack = [path]
    while stack:
        directories = yield from _remove_files(stack[-1])
        if not directories:
            _if_there(os.rmdir, stack.pop())
        stack += directories
        yield b""


def _remove_files(directory: bytes) -> Generator[bytes, None, list[bytes]]:
    """Leaves only the directories in a directory, and returns them. What goes by itself is no error."""
    try:
        with os.scandir(directory) as entries:
            found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return []
    files = [path for path, is_directory in found if not is_directory]
    for number, path in enumerate(files, 1):
        _if_there(os.unlink, path)
        if not number % REMOVED_AT_ONCE:
            yield b""
    return [path for path, is_directory in found if is_directory]


def _if_there(remove: Callable[[bytes], None], path: bytes) -> None:
    """What has gone meanwhile need not be removed."""
    try:
        remove(path)
    except FileNotFoundError:
        return


def _without_slash(path: bytes) -> bytes:
    """At its end it would have a symbolic link followed."""
    return path.rstrip(b"/") or b"/"
