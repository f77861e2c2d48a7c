"""What the kernel tells of this sandbox's memory: kills at its limit, the limit, the most that was used."""

from __future__ import annotations

import os

# Kills, peak and limit, by control groups of version 2 and of version 1.
FILES = (
    ("memory.events", "memory.peak", "memory.max"),
    ("memory.oom_control", "memory.max_usage_in_bytes", "memory.limit_in_bytes"),
)


class Memory:
    """Descriptors of the files, since their directory is not seen from inside; -1 for what is not there."""

    def __init__(self, kills: int = -1, peak: int = -1, limit: int = -1) -> None:
        self._kills = kills
        self._peak = peak
        self._limit = limit

    @classmethod
    def of(cls, group: int) -> Memory:
        """Of the control group whose directory is open as `group`."""
        for names in FILES:
            found = [_open(name, group) for name in names]
            if found[0] >= 0:
                return cls(*found)
        return cls()

    @property
    def descriptors(self) -> set[int]:
        return {self._kills, self._peak, self._limit} - {-1}

    def kills(self) -> int:
        """How often the kernel killed for the limit, as far as the host lets see."""
        for line in _read(self._kills).splitlines():
            key, _, value = line.partition(b" ")
            if key == b"oom_kill":
                return int(value)
        return 0

    def describe(self) -> bytes:
        """Limit and peak in words."""
        known = (("limit", _read(self._limit)), ("peak", _read(self._peak)))
        said = [f"{name} {value.strip().decode()} bytes" for name, value in known if value.strip().isdigit()]
        return f"memory {', '.join(said)}".encode() if said else b""


def _open(name: str, group: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=group)
    except OSError:
        return -1


def _read(fd: int) -> bytes:
    return os.pread(fd, 4096, 0) if fd >= 0 else b""
