"""What a daemon left on the host: processes, mounts, cgroups, containers, files."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sandboxd.backends.instance import instance

CGROUP_ROOT = Path("/sys/fs/cgroup")
CONTAINER_LABEL = "sandboxd.instance"
# What a stopped daemon may leave in its state directory: locks and logs.
KEPT_FILES = frozenset({"daemon.lock", "daemon.log", "launcher.lock", "launcher.log"})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What exists at one moment that a daemon on `state_dir` could have made."""

    processes: frozenset[int]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    containers: frozenset[str]
    files: frozenset[str]

    @staticmethod
    def take(state_dir: Path) -> Snapshot:
        """Reads /proc, the cgroup trees, the Docker engine if there is one, and the directory."""
        processes, mounts = _processes_and_mounts(os.fsencode(state_dir))
        cgroups, containers = instance(state_dir / "namespace"), instance(state_dir / "docker")
        return Snapshot(processes, mounts, _cgroups(cgroups), _containers(containers), _files(state_dir))

    def since(self, before: Snapshot) -> dict[str, int]:
        """How many of each kind are new."""
        kinds = ("processes", "mounts", "cgroups", "containers", "files")
        return {kind: len(getattr(self, kind) - getattr(before, kind)) for kind in kinds}


def _processes_and_mounts(mark: bytes) -> tuple[frozenset[int], frozenset[str]]:
    """Processes that name the state directory in their arguments, and mounts below it in any namespace."""
    processes, mounts = set(), set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in Path(entry.path, "cmdline").read_bytes():
                processes.add(int(entry.name))
            for line in Path(entry.path, "mountinfo").read_bytes().splitlines():
                if mark in line:
                    mounts.add(line.decode(errors="replace"))
    return frozenset(processes), frozenset(mounts)


def _cgroups(own: str) -> frozenset[str]:
    """Cgroups that the daemon made, in every hierarchy; those in which Docker keeps containers are not."""
    found: set[str] = set()
    for directory, names, _ in os.walk(CGROUP_ROOT):
        found.update(f"{directory}/{name}" for name in names if own in name)
    return frozenset(found)


def _containers(own: str) -> frozenset[str]:
    """Containers that the daemon made; none where no engine answers."""
    command = ["docker", "ps", "-aq", "--no-trunc", "--filter", f"label={CONTAINER_LABEL}={own}"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, PermissionError):
        return frozenset()
    return frozenset(listing.stdout.split()) if listing.returncode == 0 else frozenset()


def _files(state_dir: Path) -> frozenset[str]:
    """Files below the directory; what vanishes while it is looked at is not there."""
    return frozenset(
        os.path.relpath(os.path.join(directory, name), state_dir)  # noqa: PTH118 - os.walk gives strings
        for directory, _, names in os.walk(state_dir)
        for name in names
        if name not in KEPT_FILES
    )
