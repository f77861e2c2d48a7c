"""Whole directories as tar archives, packed and unpacked piece by piece; nothing is held whole in memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator

from sandboxd.guest import archive
from sandboxd.guest.archive import Entry
from sandboxd.guest.files import make_directories, write_all
from sandboxd.guest.wire import PIECE

KINDS = {
    stat.S_IFREG: archive.REGULAR,
    stat.S_IFDIR: archive.DIRECTORY,
    stat.S_IFLNK: archive.SYMLINK,
    stat.S_IFIFO: archive.FIFO,
}


def pack(root: bytes) -> Generator[bytes, None, None]:
    """The archive of all below the directory `root`, names sorted, in pieces of about 64 KiB. Raises OSError.

    A file that has grown since its header was written is cut there. Sockets and devices are left out.
    """
    if not os.path.isdir(root):
        os.stat(root)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    pending = bytearray()
    for piece in _pack(root):
        pending += piece
        if len(pending) >= PIECE:
            yield bytes(pending)
            pending.clear()
    yield bytes(pending + archive.END)


def _pack(root: bytes) -> Iterator[bytes]:
    names: dict[tuple[int, int], bytes] = {}
    for path, name in _walk(root):
        fd = -1
        try:
            status = os.stat(path) if name == b"./" else os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                # Described by what was opened: another may take its place at any time. A pipe would block.
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                status = os.fstat(fd)
            entry = _entry(path, name, status)
            if entry is None:
                continue
            if status.st_nlink > 1 and entry.kind != archive.DIRECTORY:
                first = names.setdefault((status.st_dev, status.st_ino), name)
                if first != name:
                    entry.kind, entry.size, entry.target = archive.HARD_LINK, 0, first
            yield archive.header(entry)
            if entry.kind == archive.REGULAR:
                yield from _body(fd, entry.size)
        except FileNotFoundError:
            if name == b"./":
                raise
            continue  # removed since its directory was read
        except OSError as error:
            raise _named(error, path) from error
        finally:
            if fd >= 0:
                os.close(fd)


def _walk(root: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every path below `root` with its name in the archive, directories before what they hold."""
    stack = [(root, b"./")]
    while stack:
        path, name = stack.pop()
        yield path, name
        if not name.endswith(b"/"):
            continue
        try:
            with os.scandir(path) as entries:
                found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        except FileNotFoundError:
            if name == b"./":
                raise
            continue
        except OSError as error:
            raise _named(error, path) from error
        stack += [
            (os.path.join(path, below), name + below + (b"/" if is_directory else b""))
            for below, is_directory in reversed(found)
        ]


def _entry(path: bytes, name: bytes, status: os.stat_result) -> Entry | None:
    kind = KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        return None
    entry = Entry(kind, name)
    entry.mode, entry.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if kind == archive.REGULAR:
        entry.size = status.st_size
    if kind == archive.SYMLINK:
        entry.target = os.readlink(path)
    return entry


def _body(fd: int, size: int) -> Iterator[bytes]:
    left = size
    while left:
        piece = os.read(fd, min(left, PIECE))
        if not piece:
            raise OSError(errno.EIO, "it became shorter while it was read")
        left -= len(piece)
        yield piece
    yield bytes(archive.padding(size))


def _named(error: OSError, path: bytes) -> OSError:
    return type(error)(error.errno, f"{os.fsdecode(path)}: {error.strerror}")


class Refused(OSError):
    """The archive is none, or asks for what is not done for any; nothing of the host is at fault."""


class Unpacker:
    """Fills a directory from an archive that comes piece by piece; what is in the way is replaced.

    Entries that would lie outside the directory, by their name or behind a symbolic link, are refused.
    Modes and times of directories are set at the end, for what they hold must be written first.
    """

    def __init__(self, root: bytes) -> None:
        self._made_root = not os.path.isdir(root)
        make_directories(root)
        self._root = root
        self._buffer = bytearray()
        self._overrides = archive.Overrides()
        self._extension: Entry | None = None
        self._file: Entry | None = None
        self._fd = -1
        self._path = b""
        self._left = 0
        self._skip = 0
        self._ended = False
        self._count = 0
        self._directories: dict[bytes, Entry] = {}

    def feed(self, data: bytes) -> None:
        """Raises OSError."""
        if self._ended:
            return  # archives are padded to whole records
        self._buffer += data
        try:
            while not self._ended and self._step():
                pass
        except (ValueError, OverflowError) as error:
            raise Refused(errno.EINVAL, f"not a tar archive: {error}") from error

    def finish(self) -> int:
        """The archive is complete; returns how many entries it had. Raises OSError."""
        if not self._ended:
            raise Refused(errno.EINVAL, "the archive ends early")
        deepest_first = sorted(self._directories.items(), key=lambda item: -item[0].count(b"/"))
        for path, entry in deepest_first:
            os.chmod(path, entry.mode & 0o7777)
            os.utime(path, (entry.mtime, entry.mtime))
        return self._count

    def abandon(self) -> None:
        """No more will come; what was unpacked whole stays. Idempotent."""
        if self._fd < 0:
            return
        try:
            # Another may have taken its place meanwhile.
            if os.path.samestat(os.fstat(self._fd), os.lstat(self._path)):
                os.unlink(self._path)
        except OSError:
            pass  # It is gone, or whoever called hears of what is wrong with the directory.
        self._close_file()

    def _close_file(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def _step(self) -> bool:
        """Takes one thing off the buffer; False when more must come first."""
        if self._file is not None:
            return self._take_body(self._file)
        if self._skip:
            return self._take_padding()
        if self._extension is not None:
            return self._take_extension(self._extension)
        if len(self._buffer) < archive.BLOCK:
            return False
        entry = archive.parse(bytes(self._buffer[: archive.BLOCK]))
        del self._buffer[: archive.BLOCK]
        if entry is None:
            self._ended = True
        elif entry.kind in archive.EXTENSIONS:
            if entry.size > archive.MAX_EXTENSION:
                raise archive.Malformed(f"an extension of {entry.size} bytes")
            self._extension = entry
        else:
            self._overrides.apply(entry)
            try:
                self._place(entry)
            except OSError as error:
                raise _named(error, entry.name) from error
            self._count += 1
        return True

    def _take_body(self, entry: Entry) -> bool:
        taken = min(self._left, len(self._buffer))
        write_all(self._fd, bytes(self._buffer[:taken]))
        del self._buffer[:taken]
        self._left -= taken
        if self._left:
            return False
        os.fchmod(self._fd, entry.mode & 0o7777)
        os.utime(self._fd, (entry.mtime, entry.mtime))
        self._close_file()
        self._file, self._skip = None, archive.padding(entry.size)
        return True

    def _take_padding(self) -> bool:
        taken = min(self._skip, len(self._buffer))
        del self._buffer[:taken]
        self._skip -= taken
        return not self._skip

    def _take_extension(self, entry: Entry) -> bool:
        if len(self._buffer) < entry.size:
            return False
        self._overrides.add(entry.kind, bytes(self._buffer[: entry.size]))
        del self._buffer[: entry.size]
        self._extension, self._skip = None, archive.padding(entry.size)
        return True

    def _place(self, entry: Entry) -> None:
        path = self._inside(entry.name)
        entry.mtime = min(max(entry.mtime, 0), archive.OCTAL_LIMIT - 1)
        if entry.kind == archive.DIRECTORY:
            self._make_directory(path, entry)
            return
        if path == self._root:
            raise Refused(errno.EINVAL, "an entry without a name")
        if entry.kind == archive.HARD_LINK:
            self._link(self._inside(entry.target), path)
            return
        _clear(path)
        if entry.kind == archive.REGULAR:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd, self._path = os.open(path, flags, 0o600), path
            self._file, self._left = entry, entry.size
            return
        if entry.kind == archive.SYMLINK:
            os.symlink(entry.target, path)
            os.utime(path, (entry.mtime, entry.mtime), follow_symlinks=False)
        elif entry.kind == archive.FIFO:
            os.mkfifo(path, entry.mode & 0o7777)
        else:
            raise Refused(errno.EPERM, f"an entry of kind {entry.kind!r} cannot be made")

    def _link(self, source: bytes, path: bytes) -> None:
        if source == path:
            os.lstat(path)  # a link to itself asks only that it be there
            return
        _clear(path)
        os.link(source, path, follow_symlinks=False)

    def _make_directory(self, path: bytes, entry: Entry) -> None:
        if path == self._root:
            if self._made_root:  # one that was there is its owner's to close or open
                self._directories[path] = entry
            return
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700 | entry.mode & 0o7777)
        else:
            _clear(path)
            os.mkdir(path, 0o700)
        self._directories[path] = entry

    def _inside(self, name: bytes) -> bytes:
        """The path of an entry, its parents made. Raises OSError when it leaves the directory."""
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if name.startswith(b"/") or b".." in parts:
            raise Refused(errno.EINVAL, "it lies outside the directory")
        path = self._root
        for part in parts[:-1]:
            path = os.path.join(path, part)
            try:
                os.mkdir(path, 0o755)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise Refused(errno.ENOTDIR, "it lies behind a file or a link") from None
        return os.path.join(path, parts[-1]) if parts else path


def _clear(path: bytes) -> None:
    """Makes way for a new entry; a directory that is in the way is not replaced by a file."""
    if os.path.lexists(path):
        os.unlink(path)
