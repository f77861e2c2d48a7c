"""Copies the writable layer of a sandbox, as overlay mounts take it for a lower one, however deep it is.

The sandbox may run meanwhile and change whatever it likes: every step is taken by descriptor and follows no
link, and what vanishes on the way is left out.
"""

from __future__ import annotations

import errno
import os
import stat

OPEN_LEVELS = 64
"""Directories within one another that are open at once, with two descriptors each; those above are closed
while what is far below them is copied.
"""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PIECE = 1 << 24
OVERLAY, OPAQUE = "user.overlay.", "user.overlay.opaque"
# What says that a file system cannot do what was asked, in place of the thing itself having failed.
CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
VANISHED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


class Failed(OSError):
    """What could not be copied, with its path in the layer."""


class _Level:
    """A directory that is being copied; -1 stands for a descriptor that is closed. `left` are the names in it
    that are to be copied.
    """

    __slots__ = ("left", "name", "source", "status", "target")

    def __init__(self, name: str, source: int, target: int) -> None:
        self.name = name
        self.source = source
        self.target = target
        self.status = os.fstat(source)
        with os.scandir(source) as entries:
            self.left = [entry.name for entry in entries]

    def is_open_at(self, fd: int) -> bool:
        """Whether the descriptor is one of this directory of the source."""
        return os.path.samestat(self.status, os.fstat(fd))

    def close(self) -> None:
        if self.source >= 0:
            os.close(self.source)
        if self.target >= 0:
            os.close(self.target)
        self.source = self.target = -1


class Copier:
    """One copy. `size` counts the bytes of files. A copy that is to be `removable` by the one user that all
    files belong to has no directory that this user may not change.
    """

    def __init__(self, *, removable: bool) -> None:
        self.size = 0
        self._removable = removable
        self._links: dict[tuple[int, int], str] = {}
        self._levels: list[_Level] = []

    def copy(self, source: int, target: int) -> None:
        """Fills the empty directory `target` with all that the directory `source` holds. Raises OSError."""
        self._target = target
        _copy_attributes(source, target)
        self._levels = [_Level("", source, target)]
        try:
            while self._levels:
                self._step(self._levels[-1])
        finally:
            # The first one's descriptors are the caller's.
            for level in self._levels[1:]:
                level.close()

    def _step(self, level: _Level) -> None:
        """Copies one name of the lowest directory, or ends this where none is left."""
        name = level.left.pop() if level.left else ""
        try:
            if name:
                self._entry(level.source, level.target, name)
            else:
                self._end(level)
        except OSError as error:
            if not name or error.errno not in VANISHED or _there(level.source, name):
                raise Failed(error.errno, error.strerror, self._path(name)) from error

    def _path(self, name: str) -> str:
        """Of a name in the lowest directory; of that itself where there is none."""
        return "/".join([*(level.name for level in self._levels[1:]), *([name] if name else [])])

    def _entry(self, source: int, target: int, name: str) -> None:
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            self._begin(source, target, name)
        elif stat.S_ISREG(status.st_mode):
            self._file(source, target, name)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            # Hides a file of a lower layer; nothing else of that kind can be in a writable layer.
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=target)
        elif stat.S_ISFIFO(status.st_mode):
            os.mkfifo(name, 0o600, dir_fd=target)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
            os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)

    def _begin(self, source: int, target: int, name: str) -> None:
        """A directory: what it holds is copied next."""
        from_fd = os.open(name, DIRECTORY, dir_fd=source)
        to_fd = -1
        try:
            os.mkdir(name, 0o700, dir_fd=target)
            to_fd = os.open(name, DIRECTORY, dir_fd=target)
            _copy_attributes(from_fd, to_fd)
            self._levels.append(_Level(name, from_fd, to_fd))
        except BaseException:
            os.close(from_fd)
            if to_fd >= 0:
                os.close(to_fd)
            raise
        if len(self._levels) > OPEN_LEVELS + 1:
            self._levels[-OPEN_LEVELS - 1].close()

    def _end(self, level: _Level) -> None:
        """All that it holds has been copied."""
        status = os.fstat(level.source) if level.source >= 0 else level.status
        # Not before: what is made in a directory changes its times.
        _describe(level.target, status, more=0o700 if self._removable else 0)
        if len(self._levels) > 1:
            above = self._levels[-2]
            if above.target < 0:
                above.target = os.open("..", DIRECTORY, dir_fd=level.target)
                above.source = self._found_again(above, level)
                if above.source < 0:
                    above.left.clear()
            level.close()
        self._levels.pop()

    def _found_again(self, above: _Level, level: _Level) -> int:
        """A descriptor of the directory of the source above `level`; -1 where it is not where it was."""
        fd = _opened("..", level.source) if level.source >= 0 else -1
        if fd >= 0 and not above.is_open_at(fd):
            # Something was moved elsewhere meanwhile.
            os.close(fd)
            fd = -1
        return fd if fd >= 0 else self._found_by_path(above)

    def _found_by_path(self, wanted: _Level) -> int:
        fd = os.dup(self._levels[0].source)
        for level in self._levels[1 : self._levels.index(wanted) + 1]:
            below = _opened(level.name, fd)
            os.close(fd)
            if below < 0:
                return -1
            fd = below
        if wanted.is_open_at(fd):
            return fd
        os.close(fd)
        return -1

    def _file(self, source: int, target: int, name: str) -> None:
        # Something else may have taken its place: a pipe would block.
        from_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        try:
            status = os.fstat(from_fd)
            if not stat.S_ISREG(status.st_mode) or self._linked(status, target, name):
                return
            to_fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
            try:
                self.size += _copy_data(from_fd, to_fd, status.st_size)
                _describe(to_fd, status)
                _copy_attributes(from_fd, to_fd)
            finally:
                os.close(to_fd)
        finally:
            os.close(from_fd)

    def _linked(self, status: os.stat_result, target: int, name: str) -> bool:
        """Whether it is another name of a file that was copied, and could be made one of the copy."""
        if status.st_nlink < 2:
            return False
        path = self._path(name)
        first = self._links.setdefault((status.st_dev, status.st_ino), path)
        if first == path:
            return False
        try:
            os.link(first, name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return False
        return True


def _opened(name: str, directory: int) -> int:
    """A directory by its name in another; -1 where there is none."""
    try:
        return os.open(name, DIRECTORY, dir_fd=directory)
    except OSError as error:
        if error.errno not in VANISHED:
            raise
        return -1


def _there(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _describe(fd: int, status: os.stat_result, more: int = 0) -> None:
    os.fchown(fd, status.st_uid, status.st_gid)
    os.fchmod(fd, stat.S_IMODE(status.st_mode) | more)
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_attributes(source: int, target: int) -> None:
    """Those of the overlay's own that say something of a layer, and those that users set."""
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno in CANNOT:
            return
        raise
    for name in names:
        if name.startswith("user.") and (name == OPAQUE or not name.startswith(OVERLAY)):
            try:
                os.setxattr(target, name, os.getxattr(source, name))
            except OSError as error:
                if error.errno != errno.ENODATA:  # removed since it was listed
                    raise


def _copy_data(source: int, target: int, size: int) -> int:
    """Copies the first `size` bytes, holes left as holes; returns how many bytes were data."""
    copied, position = 0, 0
    while position < size:
        try:
            begin = os.lseek(source, position, os.SEEK_DATA)
            end = min(os.lseek(source, begin, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                break
            raise
        copied += _copy_range(source, target, begin, end)
        position = max(end, begin)
    os.ftruncate(target, size)
    return copied


def _copy_range(source: int, target: int, begin: int, end: int) -> int:
    position = begin
    while position < end:
        count = min(end - position, PIECE)
        try:
            done = os.copy_file_range(source, target, count, position, position)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            os.lseek(target, position, os.SEEK_SET)
            done = os.sendfile(target, source, position, count)
        if not done:
            break  # it became shorter
        position += done
    return position - begin
