"""What the processes of a daemon take on the host, read from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process at one moment: resident bytes, open descriptors, threads, processor seconds so far."""

    rss_bytes: int
    fds: int
    threads: int
    cpu_seconds: float

    @staticmethod
    def of(pid: int) -> Usage:
        """Raises OSError when there is no such process, or it is another user's."""
        process = Path(f"/proc/{pid}")
        lines = (process / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        fds = sum(1 for _ in (process / "fd").iterdir())
        rss = int(fields["VmRSS"].split()[0]) * 1024
        return Usage(rss, fds, int(fields["Threads"]), cpu_seconds(pid))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken so far. Raises OSError when there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state_directory(address: str) -> Path:
    """Of a daemon that serves on its default socket."""
    return Path(address.removeprefix(UNIX)).parent


def daemon_pid(state: Path) -> int:
    """By its lock file. Raises OSError, ValueError where there is none."""
    return int((state / "daemon.lock").read_text())


def serving_pid(address: str) -> int | None:
    """Which process of this host serves a socket, as the kernel says; None of one of another host or user, or
    with a port.
    """
    if not address.startswith(UNIX):
        return None
    with socket.socket(socket.AF_UNIX) as ours, contextlib.suppress(OSError):
        ours.connect(address.removeprefix(UNIX))
        credentials = ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("=iII"))
        pid: int = struct.unpack("=iII", credentials)[0]
        Usage.of(pid)
        return pid
    return None


def launcher_pid(state: Path) -> int | None:
    """Of the namespace backend; None where none runs."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _is_launcher(entry, state):
                return int(entry.name)
    return None


def _is_launcher(process: Path, state: Path) -> bool:
    """A child of the keeper, which holds the lock on the state directory."""
    if (process / "comm").read_text() != "sandboxd-launch\n":
        return False
    parent = (process / "stat").read_text().rpartition(") ")[2].split()[1]
    lock = state / "namespace" / "launcher.lock"
    return any(fd.exists() and fd.samefile(lock) for fd in Path(f"/proc/{parent}/fd").iterdir())
