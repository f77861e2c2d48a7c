"""Which users a user namespace of ours has, as its owner outside of it maps them."""

from __future__ import annotations

import os

# The first number of the users that sandboxes get when root starts them: a range that systemd and the
# tools of useradd leave free.
UID_BASE = 1_879_048_192
# As many users as an image may name.
MAPPED_USERS = 1 << 16


def has_range(uid_base: int) -> bool:
    """Whether sandboxes can have users of their own: as root, unless in a container without them."""
    if os.geteuid():
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= uid_base and uid_base + MAPPED_USERS <= first + count for first, _, count in ranges)


def map_users(pid: int, uid_base: int) -> None:
    """Gives the new user namespace of process `pid` the range from `uid_base`, else this user as its root."""
    if has_range(uid_base):
        lines = [f"0 {uid_base} {MAPPED_USERS}"] * 2
    else:
        _write_map(pid, "setgroups", "deny")
        lines = [f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1"]
    for name, line in zip(("uid_map", "gid_map"), lines, strict=True):
        _write_map(pid, name, line)


def mapped_users() -> int:
    """How many users this process's own namespace has."""
    with open("/proc/self/uid_map") as file:
        return sum(int(line.split()[2]) for line in file)


def _write_map(pid: int, name: str, text: str) -> None:
    with open(f"/proc/{pid}/{name}", "w") as file:
        file.write(text)
