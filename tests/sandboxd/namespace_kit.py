"""The namespace backend for a test, and a look at what it leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.backends.rootfs import VACANT_PREFIX
from sandboxd.backends.users import UID_BASE, has_range

# An ordinary user has no number to give for a sandbox's root.
NOT_MAPPED = "Operation not permitted" if os.geteuid() == 0 else "Invalid argument"


@contextlib.asynccontextmanager
async def opened(state: Path, options: NamespaceOptions | None = None) -> AsyncIterator[NamespaceBackend]:
    backend = NamespaceBackend(state, options)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NamespaceBackend]:
    """Open; afterwards nothing of it may be left on the host."""
    state = tmp_path / "state"
    async with opened(state) as backend:
        yield backend
    assert not state.exists()
    assert leftovers(state) == []


def launcher_and_keeper(backend: NamespaceBackend) -> tuple[int, int]:
    launcher = backend.launcher_pid
    assert launcher is not None
    return launcher, int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])


def leftovers(state: Path) -> list[str]:
    """Processes, mounts and control groups that speak of this state directory."""
    name = NamespaceBackend(state).instance
    # Not by glob, which fails when groups of others go meanwhile.
    groups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/{name}")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(state) in line]
    return groups + mounts + [str(pid) for pid in processes_in(state)]


def inhabited(state: Path) -> list[str]:
    """The directories of sandboxes and of branches below a backend's state directory, not vacant places."""
    names = [path.name for path in (state / "sandboxes").iterdir()]
    return [name for name in names if not name.startswith(VACANT_PREFIX)]


def processes_in(state: Path) -> Iterator[int]:
    """Processes that work below the state directory, or have it among their mounts."""
    for entry in Path("/proc").iterdir():
        try:
            where = str((entry / "cwd").readlink())
            mounts = (entry / "mountinfo").read_text()
        except OSError:
            continue
        if where.startswith(str(state)) or str(state) in mounts:
            yield int(entry.name)


def skip_without_users(backend: object) -> None:
    """Commands have users only where root runs the daemon and a control group counts their processes."""
    assert isinstance(backend, NamespaceBackend)
    if not backend._linking.has_users:
        assert not (has_range(UID_BASE) and "pids" in backend._linking.enforced)
        pytest.skip("this host has one user for all sandboxes of this daemon")
