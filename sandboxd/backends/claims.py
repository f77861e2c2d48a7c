"""Whose a launcher's control groups are: a lock that its processes hold for as long as one of them lives.

A state directory may be removed while its launcher lives, or after it was killed together with its keeper.
Then nothing there tells of the groups any more; the lock does, for it lies on their own directories.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time

from sandboxd.backends import cgroup

# What all groups of launchers are called, before what tells one from the other.
PREFIX = "sandboxd-"
TRIES, PAUSE_SECONDS = 20, 0.05
# Who holds the lock has this bit set: what lacks it may be a launcher's that knows of no locks.
LOCKED_MODE = 0o755 | stat.S_ISVTX


def claim(root: str, own: str, name: str) -> list[cgroup.Hierarchy]:
    """`cgroup.find`, and no other launcher's until this process and those forked from it have ended.

    Raises BlockingIOError with the directory where another launcher has it and keeps it.
    """
    held = ""
    for _ in range(TRIES):
        hierarchies = cgroup.find(root, own, name)
        locks: list[int] = []
        for _, directory, _ in hierarchies:
            lock = _lock(directory)
            if lock < 0:
                held = directory
                break
            os.chmod(directory, LOCKED_MODE)
            locks.append(lock)
        else:
            return hierarchies  # The descriptors stay open, here and in what is forked.
        for lock in locks:
            os.close(lock)
        time.sleep(PAUSE_SECONDS)
    raise BlockingIOError(None, "another launcher has it", held)


def sweep_orphans(hierarchies: list[cgroup.Hierarchy]) -> None:
    """Removes the groups beside ours of launchers that were killed together with their keepers. What has
    processes stays, and so does what is not this user's to remove."""
    for _, own, _ in hierarchies:
        parent = os.path.dirname(own)
        for name in os.listdir(parent):
            directory = os.path.join(parent, name)
            if name.startswith(PREFIX) and directory != own:
                _sweep_orphan(directory)


def _sweep_orphan(directory: str) -> None:
    try:
        if not os.lstat(directory).st_mode & stat.S_ISVTX:
            return
        lock = _lock(directory)
        if lock < 0:
            return
        try:
            groups = [entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
            if not any(_has_processes(group) for group in (directory, *groups)):
                for group in (*groups, directory):
                    os.rmdir(group)
        finally:
            os.close(lock)
    except OSError:
        return  # It went, or is not empty, or not ours: nothing of ours waits for it.


def _has_processes(group: str) -> bool:
    with open(os.path.join(group, "cgroup.procs")) as file:
        return bool(file.read(1))


def _lock(directory: str) -> int:
    """A descriptor; -1 where another has the directory, or it has gone meanwhile."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.lstat(directory)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return -1
