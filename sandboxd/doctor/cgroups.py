"""Reads which limits control groups would hold for sandboxes, as `backends.cgroup.find` decides by trying."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from sandboxd.backends.cgroup import CONTROLLERS
from sandboxd.doctor.facts import UNLIMITED, Groups
from sandboxd.doctor.tree import Tree

MOUNT = "sys/fs/cgroup"
PIDS = ("pids.max", "pids.current")
MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
MEMORY_V2 = ("memory.max", "memory.current")
# Version 1 writes "no limit" as the largest number of whole pages.
V1_UNLIMITED = 1 << 60


def read_groups(tree: Tree) -> Groups:
    """Version 2 where it has controllers, else version 1, else none."""
    own = tree.text("proc/self/cgroup") or ""
    if tree.has(f"{MOUNT}/cgroup.controllers"):
        return _version_2(tree, own)
    return _version_1(tree, own)


def _version_2(tree: Tree, own: str) -> Groups:
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), "/")
    enforced: frozenset[str] = frozenset()
    for group in _upwards(tree, MOUNT, path):
        found = _handed_on(tree, group, path) if tree.may_write(group) else frozenset()
        enforced = max(enforced, found, key=len)
    return _rooms(tree, 2, enforced, (MOUNT, path), (MOUNT, path, *MEMORY_V2))


def _handed_on(tree: Tree, group: str, own: str) -> frozenset[str]:
    """Controllers that groups below this one have, or could be given.

    None while processes live in it, but those of the daemon's own group make room.
    """
    enabled = set((tree.text(f"{group}/cgroup.subtree_control") or "").split())
    procs = f"{group}/cgroup.procs"
    free = group == MOUNT or not (tree.text(procs) or "").strip()
    movable = group == f"{MOUNT}/{own.strip('/')}" and tree.may_write(procs)
    if (free or movable) and tree.may_write(f"{group}/cgroup.subtree_control"):
        enabled |= set((tree.text(f"{group}/cgroup.controllers") or "").split())
    return frozenset(enabled & set(CONTROLLERS))


def _version_1(tree: Tree, own: str) -> Groups:
    enforced: set[str] = set()
    places: dict[str, tuple[str, str]] = {}
    for line in own.splitlines():
        parts = line.split(":", 2)
        if len(parts) < 3:
            continue
        mount, path = f"{MOUNT}/{parts[1]}", parts[2]
        for controller in set(parts[1].split(",")) & set(CONTROLLERS):
            places[controller] = (mount, path)
            if tree.may_write(f"{mount}/{path.lstrip('/')}"):
                enforced.add(controller)
    memory = (*places["memory"], *MEMORY_V1) if "memory" in places else None
    return _rooms(tree, 1 if places else 0, frozenset(enforced), places.get("pids"), memory)


def _rooms(
    tree: Tree,
    version: int,
    enforced: frozenset[str],
    pids: tuple[str, str] | None,
    memory: tuple[str, str, str, str] | None,
) -> Groups:
    """The least room among a group and those above it: each of them counts what is below."""
    tightest = (
        min(_limits(tree, *pids, *PIDS), key=lambda found: found[1] - found[2], default=None)
        if pids
        else None
    )
    found = _limits(tree, *memory) if memory else ()
    least = min((most - now + _reclaimable(tree, group) for group, most, now in found), default=None)
    return Groups(
        version=version,
        enforced=enforced,
        pids_max=tightest[1] if tightest else None,
        pids_now=tightest[2] if tightest else 0,
        pids_group=f"/{tightest[0]}" if tightest else "",
        memory_room=least,
    )


def _limits(tree: Tree, mount: str, path: str, most: str, now: str) -> Iterator[tuple[str, int, int]]:
    for group in _upwards(tree, mount, path):
        value, used = tree.number(f"{group}/{most}"), tree.number(f"{group}/{now}")
        if value is not None and value < V1_UNLIMITED:
            yield group, value, used or 0
        elif value is not None:
            yield group, UNLIMITED, 0


def _reclaimable(tree: Tree, group: str) -> int:
    """Bytes of files that nobody has used for long: the kernel takes them back before it refuses memory."""
    names = ("total_inactive_file", "inactive_file")
    stat = [line.split() for line in (tree.text(f"{group}/memory.stat") or "").splitlines()]
    found = [
        int(words[1]) for words in stat if len(words) == 2 and words[0] in names and words[1].isdecimal()
    ]
    return max(found, default=0)


def _upwards(tree: Tree, mount: str, path: str) -> Iterator[str]:
    """The group and all above it, as paths below the root. In a container they may not be in the mount."""
    group = PurePosixPath(path.strip("/"))
    while str(group) not in (".", ""):
        if tree.has(f"{mount}/{group}"):
            yield f"{mount}/{group}"
        group = group.parent
    yield mount
