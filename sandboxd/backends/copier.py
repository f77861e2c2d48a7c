"""Copies the writable layer of a sandbox, as overlay mounts take it for a lower one.

The sandbox may run meanwhile and change whatever it likes: every step is taken by descriptor and follows no
link, and what vanishes on the way is left out.
"""

from __future__ import annotations

import errno
import os
import stat

DEPTH = 200
"""Directories within one another; each holds two descriptors while what is below it is copied."""
PIECE = 1 << 24
OVERLAY, OPAQUE = "user.overlay.", "user.overlay.opaque"
# What says that a file system cannot do what was asked, in place of the thing itself having failed.
CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
VANISHED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


class Failed(OSError):
    """What could not be copied, with its path in the layer."""


class Copier:
    """One copy. `size` counts the bytes of files. A copy that is to be `removable` by the one user that all
    files belong to has no directory that this user may not change.
    """

    def __init__(self, *, removable: bool) -> None:
        self.size = 0
        self._removable = removable
        self._links: dict[tuple[int, int], tuple[list[str], str]] = {}

    def copy(self, source: int, target: int) -> None:
        """Fills the empty directory `target` with all that the directory `source` holds. Raises OSError."""
        self._target = target
        self._directory(source, target, [])

    def _directory(self, source: int, target: int, at: list[str]) -> None:
        if len(at) > DEPTH:
            raise OSError(errno.ELOOP, f"more than {DEPTH} directories within one another")
        with os.scandir(source) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            try:
                self._entry(source, target, name, at)
            except Failed:
                raise
            except OSError as error:
                if error.errno not in VANISHED or _there(source, name):
                    raise Failed(error.errno, error.strerror, "/".join([*at, name])) from error
        _describe(target, os.fstat(source), more=0o700 if self._removable else 0)
        _copy_attributes(source, target)

    def _entry(self, source: int, target: int, name: str, at: list[str]) -> None:
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            self._below(source, target, name, at)
        elif stat.S_ISREG(status.st_mode):
            self._file(source, target, name, at)
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

    def _below(self, source: int, target: int, name: str, at: list[str]) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        from_fd = os.open(name, flags, dir_fd=source)
        try:
            os.mkdir(name, 0o700, dir_fd=target)
            to_fd = os.open(name, flags, dir_fd=target)
            try:
                self._directory(from_fd, to_fd, [*at, name])
            finally:
                os.close(to_fd)
        finally:
            os.close(from_fd)

    def _file(self, source: int, target: int, name: str, at: list[str]) -> None:
        # Something else may have taken its place: a pipe would block.
        from_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        try:
            status = os.fstat(from_fd)
            if not stat.S_ISREG(status.st_mode) or self._linked(status, target, name, at):
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

    def _linked(self, status: os.stat_result, target: int, name: str, at: list[str]) -> bool:
        """Whether it is another name of a file that was copied, and could be made one of the copy."""
        if status.st_nlink < 2:
            return False
        first = self._links.setdefault((status.st_dev, status.st_ino), (at, name))
        if first == (at, name):
            return False
        path = "/".join([*first[0], first[1]])
        try:
            os.link(path, name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return False
        return True


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
