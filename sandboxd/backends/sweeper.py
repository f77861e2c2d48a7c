"""Removes what ended sandboxes leave on disk and in control groups, for a launcher that must not wait."""

from __future__ import annotations

import os
import socket

from sandboxd.backends import syscalls as sys
from sandboxd.backends.cgroup import Cgroups

# Deeper directories are moved up first: a sandbox may nest them past any limit on open files.
DEPTH = 32
ANSWER_BYTES = 4096


def remove_tree(parent: int, name: str) -> None:
    """Removes `name` below the directory `parent` with all it holds; follows no link. Idempotent."""
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
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
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


def sweep_for(channel: socket.socket, sandboxes: int, cgroups: Cgroups) -> None:
    """Removes the sandboxes whose names come in, one a line, and answers `name` or `name error`.

    `sandboxes` is a descriptor of the directory that holds them. Returns when the launcher is gone.
    """
    sys.prctl(sys.PR_SET_PDEATHSIG, 9)
    with channel.makefile("rb") as lines:
        for line in lines:
            name = line.decode().strip()
            answer = line.strip()
            try:
                cgroups.remove(name)
                remove_tree(sandboxes, name)
            except OSError as error:
                # A file's name is the sandbox's to choose: any bytes, and line ends among them.
                why = os.fsencode(f"{error.strerror}: {error.filename}").replace(b"\n", b"?")
                answer += b" " + why[:ANSWER_BYTES]
            channel.sendall(answer + b"\n")
