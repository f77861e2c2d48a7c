"""Unpacks one layer of an image: a program of its own, shut into the directory that it fills.

`main` gets the directory and the first number of the sandboxes' users, reads an uncompressed tar archive from
standard input, and answers one line of JSON: {"size", "left_out"} or {"error"}.

It works as root of a user namespace that has nobody but the sandboxes' users, with the directory as its root:
whatever an archive says, it can reach nothing else. Whiteouts (names that begin with `.wh.`) become what
overlay mounts take for them. Devices and extended attributes are left out.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys as python
import tarfile

from sandboxd.backends import sweeper, users
from sandboxd.backends import syscalls as sys

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
OPAQUE_ATTRIBUTE = "user.overlay.opaque"
PIECE = 1 << 20

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO


def main() -> None:
    """Ends the process."""
    directory, uid_base = python.argv[3:]
    if users.has_range(int(uid_base)):
        os.chown(directory, int(uid_base), int(uid_base))
    ready, unshared = os.pipe2(os.O_CLOEXEC)
    mapped, go = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        os.close(go)
        _report(lambda: _unpack_here(directory, parent, unshared, mapped))
    os.close(unshared)
    os.close(mapped)
    if os.read(ready, 1):
        users.map_users(pid, int(uid_base))
        os.write(go, b"1")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) and 1)


def _report(work: Callable[[], dict[str, int]]) -> None:
    code = 1
    answer: dict[str, object] = {}
    try:
        answer = {**work()}
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answer = {"error": f"{where}{error.strerror or error}"}
    except tarfile.TarError as error:
        answer = {"error": f"not a tar archive: {error}"}
    finally:
        os.write(1, json.dumps(answer).encode() + b"\n")
        os._exit(code)


def _unpack_here(directory: str, parent: int, unshared: int, mapped: int) -> dict[str, int]:
    target = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys.unshare(sys.CLONE_NEWUSER | sys.CLONE_NEWNS)
    os.write(unshared, b"1")
    if not os.read(mapped, 1):
        raise OSError(errno.EPERM, "no users could be mapped into a user namespace")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    many = users.mapped_users() > 1
    if many:
        os.setgroups([])
    # Only now, for a change of user clears it. Who asked for it may be gone, and then nobody wants it.
    sys.prctl(sys.PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)
    # By descriptor: this user may be unable to walk there.
    os.fchdir(target)
    os.chroot(".")
    os.umask(0)
    layer = _Layer(own_users=many)
    with tarfile.open(fileobj=python.stdin.buffer, mode="r|", errorlevel=1) as archive:
        for member in archive:
            layer.add(archive, member)
    layer.finish()
    return {"size": layer.size, "left_out": layer.left_out}


class _Layer:
    """The tree that is filled; the process's root is its root."""

    def __init__(self, *, own_users: bool) -> None:
        self._own_users = own_users
        self._times: list[tuple[list[str], float]] = []
        self.size = 0
        self.left_out = 0

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Raises OSError, with the entry's name."""
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        try:
            if ".." in parts:
                raise OSError(errno.EINVAL, "it would lie outside of the image")
            parent = _open(parts[:-1])
            try:
                self._place(archive, member, parts, parent)
            finally:
                os.close(parent)
        except OSError as error:
            raise OSError(error.errno, error.strerror, member.name) from error
        except (ValueError, OverflowError) as error:
            raise OSError(errno.EINVAL, f"it says what cannot be: {error}", member.name) from error

    def _place(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str], parent: int
    ) -> None:
        name = parts[-1] if parts else "."
        if name.startswith(WHITEOUT):
            _whiteout(name, parent)
        elif member.isdir():
            _make_directory(name, parent)
            self._describe(member, name, parent)
            self._times.append((parts, member.mtime))
        elif name == ".":
            raise OSError(errno.EINVAL, "an entry without a name")
        elif member.islnk():
            _link(member.linkname, name, parent)
        elif member.issym():
            _clear(name, parent)
            os.symlink(member.linkname, name, dir_fd=parent)
            self._describe(member, name, parent)
        elif member.isfile():
            _clear(name, parent)
            self._write(archive, member, name, parent)
            self._describe(member, name, parent)
        elif member.isfifo():
            _clear(name, parent)
            os.mkfifo(name, dir_fd=parent)
            self._describe(member, name, parent)
        else:
            self.left_out += 1

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, parent: int) -> None:
        body: BinaryIO | None = archive.extractfile(member)  # type: ignore[assignment]
        if body is None:
            raise OSError(errno.EINVAL, "a file without content")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
            while piece := body.read(PIECE):
                file.write(piece)
                self.size += len(piece)

    def _describe(self, member: tarfile.TarInfo, name: str, parent: int) -> None:
        """Owner first: a change of owner clears what a change of mode sets."""
        mode = member.mode & 0o7777
        if not (0 <= member.uid < users.MAPPED_USERS and 0 <= member.gid < users.MAPPED_USERS):
            owner = f"{member.uid}:{member.gid}"
            raise OSError(errno.EINVAL, f"its owner {owner} is beyond {users.MAPPED_USERS - 1}")
        if self._own_users:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        elif member.isdir():
            mode |= 0o700  # else its only owner could not remove what is in it
        if not member.issym():
            os.chmod(name, mode, dir_fd=parent)
        if not member.isdir():
            when = _bounded(member.mtime)
            os.utime(name, (when, when), dir_fd=parent, follow_symlinks=False)

    def finish(self) -> None:
        """Times of directories, which all that was put into them has changed. Raises OSError."""
        for parts, mtime in reversed(self._times):
            try:
                fd = _open(parts)
            except OSError:
                continue  # something else took its place later
            os.utime(fd, (_bounded(mtime), _bounded(mtime)))
            os.close(fd)


def _open(parts: list[str]) -> int:
    """The directory at `parts`, made if it is missing, one step at a time: a path may be longer than any call
    takes. Links lead where they lead, which is inside. Raises OSError."""
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
            except FileNotFoundError:
                os.mkdir(part, 0o755, dir_fd=fd)
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
    except OSError:
        os.close(fd)
        raise
    return fd


def _make_directory(name: str, parent: int) -> None:
    """A directory that is there stays with what it holds."""
    if name == ".":
        return
    mode = _status(name, parent).st_mode
    if stat.S_ISDIR(mode):
        return
    _clear(name, parent)
    os.mkdir(name, 0o755, dir_fd=parent)
    if stat.S_ISCHR(mode):  # its whiteout came first
        _hide_below(name, parent)


def _link(target: str, name: str, parent: int) -> None:
    parts = [part for part in target.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise OSError(errno.EINVAL, "a hard link to outside of the image")
    source = _open(parts[:-1])
    try:
        if os.path.samestat(os.lstat(parts[-1], dir_fd=source), _status(name, parent)):
            return
        _clear(name, parent)
        os.link(parts[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(source)


def _whiteout(name: str, parent: int) -> None:
    if name == OPAQUE:
        _hide_below(".", parent)
        return
    hidden = name.removeprefix(WHITEOUT)
    if hidden.startswith(WHITEOUT):
        return  # another union file system's own notes
    if hidden in ("", ".", ".."):
        raise OSError(errno.EINVAL, "a whiteout without a name")
    # It hides what lower layers have, never what this one has.
    mode = _status(hidden, parent).st_mode
    if stat.S_ISDIR(mode):
        _hide_below(hidden, parent)
    elif not mode:
        os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)


def _hide_below(name: str, parent: int) -> None:
    """Of this directory only what this layer has is seen."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.setxattr(fd, OPAQUE_ATTRIBUTE, b"y")
    finally:
        os.close(fd)


def _status(name: str, parent: int) -> os.stat_result:
    try:
        return os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return os.stat_result((0,) * 10)


def _clear(name: str, parent: int) -> None:
    """Makes way: later entries of an archive win, over a whole directory, too."""
    mode = _status(name, parent).st_mode
    if stat.S_ISDIR(mode):
        sweeper.remove_tree(parent, name)
    elif mode:
        os.unlink(name, dir_fd=parent)


def _bounded(when: float) -> float:
    """A time that every file system takes. Raises ValueError."""
    if when != when:
        raise ValueError("a time that is no number")
    return min(max(when, 0.0), 2.0**32 - 1)
