"""Reads the facts of a host from /proc and /sys below a root directory; what cannot be read is left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from sandboxd.backends.users import MAPPED_USERS, UID_BASE
from sandboxd.doctor.cgroups import read_groups
from sandboxd.doctor.facts import UNLIMITED, Directory, Facts
from sandboxd.doctor.tree import Tree

SYSCTL = (
    "kernel.pid_max",
    "kernel.threads-max",
    "kernel.pty.max",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
    "fs.file-max",
    "fs.nr_open",
    "fs.mount-max",
    "fs.inotify.max_user_instances",
    "fs.inotify.max_user_watches",
    "net.core.somaxconn",
    "net.ipv4.neigh.default.gc_thresh3",
    "net.ipv6.neigh.default.gc_thresh3",
    *(f"user.max_{kind}_namespaces" for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")),
)


def read(root: Path = Path("/"), directories: Iterable[Directory] = ()) -> Facts:
    """The facts that cost nothing to read; `probes` adds those that must be tried. Raises nothing."""
    tree = Tree(root)
    sysctl = {name: value for name in SYSCTL if (value := tree.number(_sysctl_path(name))) is not None}
    is_root = _effective_user(tree) == 0
    return Facts(
        platform=sys.platform,
        root=is_root,
        has_users=is_root and _has_users(tree),
        sysctl=sysctl,
        open_files=_hard_limit(tree, "Max open files"),
        processes=_hard_limit(tree, "Max processes"),
        tasks=_tasks(tree),
        own_tasks=None if is_root else _own_tasks(tree),
        files=tree.number("proc/sys/fs/file-nr"),
        mounts=_lines(tree, "proc/self/mountinfo"),
        memory_available=_memory_available(tree),
        has_overlay=_has_overlay(tree),
        groups=read_groups(tree),
        directories=tuple(directories),
        neighbours=_neighbours(tree),
        bridges=_bridges(tree),
    )


def read_directory(setting: str, path: Path, root: Path = Path("/")) -> Directory:
    """Room and kind of the file system that `path` is on, or will be."""
    there = path.absolute()
    while not os.access(there, os.F_OK) and there != there.parent:
        there = there.parent
    try:
        disk = os.statvfs(there)
    except OSError:
        return Directory(setting, str(there))
    return Directory(
        setting,
        str(there),
        kind=_file_system(Tree(root), there),
        free_bytes=disk.f_bavail * disk.f_frsize,
        # btrfs and others count none, and make them as they are needed.
        free_inodes=disk.f_favail if disk.f_files else UNLIMITED,
    )


def _sysctl_path(name: str) -> str:
    return "proc/sys/" + name.replace(".", "/")


def _effective_user(tree: Tree) -> int | None:
    return _user(tree.text("proc/self/status"), field=2)


def _user(status: str | None, *, field: int) -> int | None:
    """`Uid:` real, effective, saved, of the file system."""
    for line in (status or "").splitlines():
        words = line.split()
        if words[:1] == ["Uid:"] and len(words) > field and words[field].isdecimal():
            return int(words[field])
    return None


def _has_users(tree: Tree) -> bool:
    """As `backends.users.has_range`, of the tree."""
    for line in (tree.text("proc/self/uid_map") or "").splitlines():
        words = line.split()
        if len(words) == 3 and all(word.isdecimal() for word in words):
            first, _, count = map(int, words)
            if first <= UID_BASE and first + count >= UID_BASE + MAPPED_USERS:
                return True
    return False


def _hard_limit(tree: Tree, name: str) -> int | None:
    """From /proc/self/limits; the daemon raises its soft limits to the hard ones."""
    for line in (tree.text("proc/self/limits") or "").splitlines():
        if line.startswith(name):
            words = line[len(name) :].split()
            if len(words) > 1 and words[1] == "unlimited":
                return UNLIMITED
            return int(words[1]) if len(words) > 1 and words[1].isdecimal() else None
    return None


def _tasks(tree: Tree) -> int | None:
    """The second number of `1/188` in /proc/loadavg: all processes and threads."""
    words = (tree.text("proc/loadavg") or "").split()
    total = words[3].partition("/")[2] if len(words) > 3 else ""
    return int(total) if total.isdecimal() else None


def _own_tasks(tree: Tree) -> int | None:
    own = _user(tree.text("proc/self/status"), field=1)
    found = 0
    for name in tree.names("proc"):
        status = tree.text(f"proc/{name}/status") if name.isdecimal() else None
        if status is not None and _user(status, field=1) == own:
            found += _threads(status)
    return found


def _threads(status: str) -> int:
    words = next((line.split() for line in status.splitlines() if line.startswith("Threads:")), [])
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else 1


def _lines(tree: Tree, path: str) -> int | None:
    text = tree.text(path)
    return None if text is None else len(text.splitlines())


def _memory_available(tree: Tree) -> int | None:
    for line in (tree.text("proc/meminfo") or "").splitlines():
        words = line.split()
        if words[:1] == ["MemAvailable:"] and len(words) > 1 and words[1].isdecimal():
            return int(words[1]) * 1024
    return None


def _has_overlay(tree: Tree) -> bool | None:
    known = tree.text("proc/filesystems")
    return None if known is None else "overlay" in known.split()


def _neighbours(tree: Tree) -> tuple[int, int] | None:
    """The first column of the first row, in hexadecimal: entries of the whole host."""
    counts = []
    for table in ("arp_cache", "ndisc_cache"):
        rows = (tree.text(f"proc/net/stat/{table}") or "").splitlines()
        words = rows[1].split() if len(rows) > 1 else []
        try:
            counts.append(int(words[0], 16))
        except (IndexError, ValueError):
            return None
    return counts[0], counts[1]


def _bridges(tree: Tree) -> dict[str, int]:
    return {
        name: len(tree.names(f"sys/class/net/{name}/brif"))
        for name in tree.names("sys/class/net")
        if tree.has(f"sys/class/net/{name}/brif")
    }


def _file_system(tree: Tree, path: Path) -> str | None:
    """The type of the mount that `path` is on: the longest mount point above it, the last of equals."""
    best, kind = -1, None
    for line in (tree.text("proc/self/mountinfo") or "").splitlines():
        words = line.split()
        if "-" not in words[4:] or len(words) <= (mark := words.index("-", 4)) + 1:
            continue
        point = words[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), words[mark + 1]
    return kind
