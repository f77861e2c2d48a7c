"""Finds and kills every process that a command started, however it detached itself.

A process group ends with `setsid`, a parent link with a double fork, and an environment variable with an
exec. A resource limit is passed on by all three: each command runs under its own value of RLIMIT_RTTIME,
which means nothing to a process that may not become real-time, and which the sandbox's seccomp filter
lets nobody but PID 1 change. Where limits of others cannot be read (gVisor), parents and sessions serve.
Chosen over a pid namespace per command: background processes may outlive their command, and PID 1 keeps
no privilege to make namespaces with. Chosen over a subreaper per command: that costs one more fork.
"""

from __future__ import annotations

import os
import resource
import signal

# Above any real use of the limit (11 days), below infinity.
FIRST_TAG = 10**12
TAGS = 10**9
# Each pass kills what it finds; a process that forks quickly needs several.
PASSES = 20


class Tagger:
    """Gives each command its value; only the soft limit moves, so that it can be taken back."""

    def __init__(self) -> None:
        self._count = 0
        _, self._hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        self._works = self._hard == resource.RLIM_INFINITY or self._hard > FIRST_TAG + TAGS

    def take(self) -> int:
        """Sets the next tag on this process, for the child about to be made; 0 where there are none."""
        if not self._works:
            return 0
        self._count = (self._count + 1) % TAGS
        tag = FIRST_TAG + self._count
        try:
            self._set(tag)
        except (OSError, ValueError):
            self._works = False
            return 0
        return tag

    def drop(self) -> None:
        """Takes the tag off this process again."""
        if self._works:
            self._set(self._hard)

    def _set(self, soft: int) -> None:
        # With an explicit pid: the form that the filter lets through.
        resource.prlimit(1 if os.getpid() == 1 else 0, resource.RLIMIT_RTTIME, (soft, self._hard))


def kill_tree(tag: int, root: int) -> bool:
    """Kills what carries `tag` or descends from the unreaped child `root` (0: there is none any more).

    Returns True once a look finds nothing of it alive.
    """
    for _ in range(PASSES):
        members = _members(tag, root)
        if not members:
            return True
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    return False


def _members(tag: int, root: int) -> set[int]:
    rows = _processes()
    # Without a tag, a root that was reaped leaves its session, whose number the kernel keeps from reuse.
    found = {pid for pid, (_, session) in rows.items() if root and root in (pid, session)}
    if tag:
        found.update(pid for pid in rows if _tag(pid) == tag)
    if root:
        found.update(_descendants(rows, root))
    found.discard(os.getpid())
    return found


def _tag(pid: int) -> int:
    try:
        return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    except (ProcessLookupError, PermissionError):
        return 0


def _descendants(rows: dict[int, tuple[int, int]], root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in rows.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and session of each process that is not yet a zombie."""
    rows = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in b"ZX":
            rows[int(name)] = (int(fields[1]), int(fields[3]))
    return rows
