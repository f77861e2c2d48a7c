"""Removes what ended sandboxes leave on disk and in control groups, for a launcher that must not wait."""

from __future__ import annotations

import os
import socket
import stat

from sandboxd.backends import syscalls as sys
from sandboxd.backends.cgroup import Cgroups, vacant_group
from sandboxd.backends.confine import ERROR_FILE
from sandboxd.backends.rootfs import BRANCH_PREFIX, VACANT_PREFIX

# Deeper directories are moved up first: a sandbox may nest them past any limit on open files.
DEPTH = 32
ANSWER_BYTES = 4096
# What is asked of the sweeper beside a removal, and its answer where it could be done.
LEAVE, LEFT = "leave", "left"
# What a sandbox leaves that wrote no file, in an order that removes it; the overlay's own are among it. Each
# name lies in a directory that is the launcher's, so that no link on the way can be the sandbox's.
OVERLAYS = os.path.join("work", "work")
FILES = ("guest.sock", f"{OVERLAYS}/incompat/volatile/dirty")
DIRECTORIES = (
    *("upper/workspace", "upper", f"{OVERLAYS}/incompat/volatile", f"{OVERLAYS}/incompat"),
    OVERLAYS,
)
PLACE = ("work", "")


def remove_sandbox(parent: int, name: str) -> None:
    """Removes the directory `name` of a sandbox below `parent`; idempotent. Most left nothing but what every
    one has, and to look for that takes longer than to remove it."""
    try:
        _remove_usual(parent, name)
        for directory in PLACE:
            os.rmdir(f"{name}/{directory}", dir_fd=parent)
    except OSError:
        remove_tree(parent, name)


def _remove_usual(parent: int, name: str) -> None:
    """Removes what every sandbox leaves, but its place. Raises OSError where there is anything else."""
    for file in FILES:
        os.unlink(f"{name}/{file}", dir_fd=parent)
    for directory in DIRECTORIES:
        os.rmdir(f"{name}/{directory}", dir_fd=parent)


def leave_place(parent: int, name: str, vacant: str, cgroups: Cgroups) -> bool:
    """Leaves the sandbox's directory and its groups by another name for the next one. False where not all of
    this can be done; then what is there, by either name, is to be removed."""
    try:
        if not cgroups.are_vacant(name):
            return False
        # One whose layer was in memory, or that got nowhere, has none.
        os.stat(f"{name}/work", dir_fd=parent)
        try:
            _remove_usual(parent, name)
        except OSError:
            for each in ("upper", OVERLAYS, FILES[0]):
                remove_tree(parent, f"{name}/{each}")
        # Of one that died of its last steps.
        remove_tree(parent, f"{name}/{ERROR_FILE}")
        os.rename(name, f"{VACANT_PREFIX}{vacant}", src_dir_fd=parent, dst_dir_fd=parent)
        cgroups.leave(name, vacant)
    except (OSError, ValueError):
        return False
    return True


def remove_tree(parent: int, name: str) -> None:
    """Removes `name` below the directory `parent` with all it holds, whatever the modes of this user's own
    directories; follows no link. Idempotent."""
    moved = [name]
    count = 0
    while moved:
        current = moved[-1]
        deep = _remove_level(parent, current, DEPTH)
        if deep is None:
            moved.pop()
            continue
        # `deep` is an open directory that holds one too deep; take that one out to the top.
        fd, entry = deep
        count += 1
        target = f"{name}.deep-{count}"
        os.rename(entry, target, src_dir_fd=fd, dst_dir_fd=parent)
        os.close(fd)
        moved.append(target)


def _remove_level(parent: int, name: str, depth: int) -> tuple[int, str] | None:
    try:
        fd = _open_directory(parent, name)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
        return None
    with os.scandir(fd) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for child, is_directory in children:
        if not is_directory:
            os.unlink(child, dir_fd=fd)
        elif depth == 0:
            return fd, child
        elif (deep := _remove_level(fd, child, depth - 1)) is not None:
            os.close(fd)
            return deep
    os.close(fd)
    os.rmdir(name, dir_fd=parent)
    return None


def _open_directory(parent: int, name: str) -> int:
    """Open, and writable where to own it is enough for that. A launcher ignores modes; a keeper that removes
    what a killed launcher left is an ordinary user's, and an overlay's own directory is closed to all."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, os.O_RDONLY | flags, dir_fd=parent)
    except PermissionError:
        path = os.open(name, os.O_PATH | flags, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{path}", stat.S_IRWXU)
            return os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.close(path)
    found = os.fstat(fd)
    if found.st_mode & stat.S_IRWXU != stat.S_IRWXU and found.st_uid == os.geteuid():
        os.fchmod(fd, stat.S_IRWXU)
    return fd


def sweep_for(channel: socket.socket, sandboxes: int, cgroups: Cgroups) -> None:
    """Removes the sandboxes whose names come in, one a line, and answers `name` or `name error`. Where a
    vacant place is named behind it, what there is of that goes, too; with `leave` behind that, the sandbox's
    place becomes that place, if it can, and the answer is `name left`.

    `sandboxes` is a descriptor of the directory that holds them. Returns when the launcher is gone.
    """
    sys.prctl(sys.PR_SET_PDEATHSIG, 9)
    with channel.makefile("rb") as lines:
        for line in lines:
            name, vacant, leave = (*line.decode().split(), "", "")[:3]
            answer = name.encode()
            try:
                if leave and leave_place(sandboxes, name, vacant, cgroups):
                    answer += b" " + LEFT.encode()
                else:
                    _remove(sandboxes, name, vacant, cgroups)
            except OSError as error:
                # A file's name is the sandbox's to choose: any bytes, and line ends among them.
                why = os.fsencode(f"{error.strerror}: {error.filename}").replace(b"\n", b"?")
                answer += b" " + why[:ANSWER_BYTES]
            channel.sendall(answer + b"\n")


def _remove(sandboxes: int, name: str, vacant: str, cgroups: Cgroups) -> None:
    cgroups.remove(name)
    # A branch is all of a sandbox's making.
    remove = remove_tree if name.startswith(BRANCH_PREFIX) else remove_sandbox
    remove(sandboxes, name)
    if vacant:
        # Of a place that was taken over in parts, or left in parts.
        cgroups.remove(vacant_group(vacant))
        remove_tree(sandboxes, f"{VACANT_PREFIX}{vacant}")
