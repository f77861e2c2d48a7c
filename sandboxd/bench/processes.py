"""What the processes of a daemon take on the host, read from outside."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process at one moment: resident bytes, open descriptors, threads."""

    rss_bytes: int
    fds: int
    threads: int

    @staticmethod
    def of(pid: int) -> Usage:
        """Raises OSError when there is no such process, or it is another user's."""
        process = Path(f"/proc/{pid}")
        lines = (process / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        fds = sum(1 for _ in (process / "fd").iterdir())
        return Usage(int(fields["VmRSS"].split()[0]) * 1024, fds, int(fields["Threads"]))


def state_directory(address: str) -> Path:
    """Of a daemon that serves on its default socket."""
    return Path(address.removeprefix("unix:")).parent


def daemon_pid(state: Path) -> int:
    """By its lock file. Raises OSError, ValueError where there is none."""
    return int((state / "daemon.lock").read_text())


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
