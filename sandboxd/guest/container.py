"""The guest as a container's first process: binds its socket and says on standard output that it is ready."""

from __future__ import annotations

import os
import socket

from sandboxd.guest.main import BACKLOG, Guest, lock_down
from sandboxd.guest.memory import Memory

# By cgroup v1 and v2, as the container sees its own.
GROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")


def serve(path: str, ready: bytes) -> None:
    """Serves the socket at `path` until a signal asks to end; writes `ready` when commands may come.

    The last line of standard output is the daemon's event: it need not look for the socket again and
    again. From then on nothing that the guest's descriptors lead to is the container's output.
    """
    group = _open_any(GROUPS, os.O_RDONLY | os.O_DIRECTORY)
    memory = Memory.of(group) if group >= 0 else Memory()
    oom_score_fd = _open_any(("/proc/self/oom_score_adj",), os.O_WRONLY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0)  # The daemon, another user, must be able to connect.
    listener.bind(path)
    os.umask(mask)
    listener.listen(BACKLOG)
    os.chdir("/")
    lock_down()
    guest = Guest(listener, memory, oom_score_fd=oom_score_fd)
    os.write(1, ready)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for stream in range(3):
        os.dup2(null, stream)
    guest.serve()


def _open_any(paths: tuple[str, ...], flags: int) -> int:
    for path in paths:
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except OSError:
            continue
    return -1
