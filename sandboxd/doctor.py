"""Checks this host for what a thousand sandboxes need, and says how to get what is missing."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sandboxd.config import default_state_dir

SANDBOXES = 960
# A sandbox is a guest, its command and what that starts; the daemon holds two descriptors for each.
PIDS_NEEDED = 8 * SANDBOXES
FILES_NEEDED = 4 * SANDBOXES
DISK_NEEDED_BYTES = 2 << 30
MEMORY_NEEDED_BYTES = 2 << 30
DOCKER_SOCKET = "/var/run/docker.sock"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `required` ones decide the verdict; the others cost a feature only."""

    name: str
    ok: bool
    required: bool
    current: str
    needed: str
    fix: str


def examine() -> list[Finding]:
    """All checks, in the order in which they bite."""
    return [
        _platform(),
        _user_namespaces(),
        _overlay(),
        _cgroups(),
        _pids(),
        _open_files(),
        _disk(),
        _memory(),
        _docker(),
    ]


def _platform() -> Finding:
    return Finding(
        "Linux", sys.platform.startswith("linux"), True, sys.platform, "linux", "use the docker backend"
    )


def _user_namespaces() -> Finding:
    probe = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    allowed = _read("/proc/sys/user/max_user_namespaces") or "?"
    fix = "sysctl -w user.max_user_namespaces=20000"
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        fix = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    elif _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        fix = "sysctl -w kernel.unprivileged_userns_clone=1"
    enough = allowed.isdecimal() and int(allowed) >= SANDBOXES
    ok = probe.returncode == 0 and enough
    current = f"at most {allowed}" if probe.returncode == 0 else probe.stderr.strip() or "refused"
    return Finding("user namespaces", ok, True, current, f"{SANDBOXES} may be made", fix)


def _overlay() -> Finding:
    known = _read("/proc/filesystems") or ""
    ok = "overlay" in known
    return Finding("overlayfs", ok, True, "yes" if ok else "not loaded", "yes", "modprobe overlay")


def _cgroups() -> Finding:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        own = (_read("/proc/self/cgroup") or "0::/").strip().rpartition("::")[2]
        ok = os.access(root / own.lstrip("/") / "cgroup.procs", os.W_OK)
        return Finding(
            "cgroup delegation",
            ok,
            False,
            "v2, writable" if ok else "v2, not delegated",
            "writable",
            "run under `systemd-run --user --scope -p Delegate=yes`, or as root",
        )
    writable = [c for c in ("memory", "pids", "cpu") if os.access(root / c / "tasks", os.W_OK)]
    return Finding(
        "cgroup delegation",
        len(writable) == 3,
        False,
        f"v1: {', '.join(writable) or 'none writable'}",
        "memory, pids, cpu",
        "run as root, or boot with cgroup v2; without it limits are per process (rlimits)",
    )


def _pids() -> Finding:
    limits = [int(text) for path in ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")
              if (text := _read(path)).isdecimal()]  # fmt: skip
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    lowest = min(limits, default=0)
    fix = "sysctl -w kernel.pid_max=131072; ulimit -u unlimited"
    return Finding("process ids", lowest >= PIDS_NEEDED, True, str(lowest), str(PIDS_NEEDED), fix)


def _open_files() -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    ok = hard == resource.RLIM_INFINITY or hard >= FILES_NEEDED
    return Finding("open files", ok, True, shown, str(FILES_NEEDED), f"ulimit -Hn {FILES_NEEDED}")


def _disk() -> Finding:
    path = default_state_dir()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    fix = "free some space, or name another directory with --state-dir"
    name = f"disk under {path}"
    return Finding(name, free >= DISK_NEEDED_BYTES, False, _size(free), _size(DISK_NEEDED_BYTES), fix)


def _memory() -> Finding:
    lines = (_read("/proc/meminfo") or "").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024
    ok = available >= MEMORY_NEEDED_BYTES
    return Finding("memory", ok, False, _size(available), _size(MEMORY_NEEDED_BYTES), "stop something")


def _docker() -> Finding:
    fix = "install docker, start it, and join the group docker"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        try:
            probe.connect(DOCKER_SOCKET)
        except OSError as error:
            return Finding("docker engine", False, False, error.strerror or "no answer", "answers", fix)
    return Finding("docker engine", True, False, "answers", "answers", fix)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def show(findings: list[Finding]) -> None:
    """Prints the checks, and for each that failed the command that mends it."""
    table = Table("", "CHECK", "NOW", "NEEDED", box=None)
    for finding in findings:
        mark = "ok" if finding.ok else ("MISSING" if finding.required else "lacking")
        table.add_row(mark, finding.name, finding.current, finding.needed)
    console = Console()
    console.print(table)
    for finding in findings:
        if not finding.ok:
            console.print(f"{finding.name}: {finding.fix}", markup=False, highlight=False)
