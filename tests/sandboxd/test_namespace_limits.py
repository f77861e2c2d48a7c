"""What one sandbox may use: each limit is met, and what happens then is the sandbox's own affair."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import FileFailed, StartFailed
from sandboxd.types import Command, ExitReason, Limits, Template

from .backend_kit import execute, pieces, shell

pytestmark = pytest.mark.anyio
TEMPLATE = Template("t")


async def test_limits_hold(backend: NamespaceBackend) -> None:
    enforced = backend.capabilities().enforced_limits
    assert {"open_files", "pids"} <= enforced
    limits = Limits(memory_bytes=64 << 20, pids=20, open_files=64)
    template = replace(TEMPLATE, limits=limits)
    connection = await backend.create("limited", template)
    assert (await shell(connection, "ulimit -n")).stdout == b"64\n"
    bomb = await shell(connection, "for n in $(seq 40); do sleep 5 & done; wait", timeout=30)
    assert b"fork" in bomb.stderr.lower()
    hog = Command(argv=(b"python3", b"-c", b"x = b'x' * (200 << 20)"))
    exited = (await execute(connection, hog)).exited
    if "memory" in enforced:
        assert exited.reason is ExitReason.OOM_KILLED
        said = re.fullmatch(r"memory limit (\d+) bytes, peak (\d+) bytes", exited.detail)
        assert said is not None, exited.detail
        assert int(said[1]) == 64 << 20 >= int(said[2]) > 60 << 20
        assert (await shell(connection, "kill -9 $$")).exited.reason is ExitReason.SIGNALED
    else:
        assert exited.exit_code == 1
    await asyncio.wait_for(connection.ping(), 20)


async def test_a_part_of_a_processor_takes_so_much_longer(backend: NamespaceBackend) -> None:
    if "cpu" not in backend.capabilities().enforced_limits:
        pytest.skip("no control groups hold processors here")
    limited = await backend.create("slow", replace(TEMPLATE, limits=Limits(cpu_count=0.1)))
    # Of itself, so that a host that is busy only makes it longer.
    spin = (
        b"import time\nbegin, used = time.monotonic(), time.process_time()\n"
        b"while time.process_time() - used < 0.1: pass\n"
        b"print(time.monotonic() - begin)"
    )
    done = await execute(limited, Command(argv=(b"python3", b"-c", spin)))
    assert float(done.stdout) > 0.5, "a tenth of a processor takes 1 s for 0.1 s"


async def test_a_disk_that_is_full_is_the_commands_own_business(backend: NamespaceBackend) -> None:
    """Each place that can be written, one after the other, up to its end: no kill, no lost sandbox."""
    limits = Limits(memory_bytes=256 << 20, disk_bytes=8 << 20)
    connection = await backend.create("full", replace(TEMPLATE, limits=limits))
    for place in ("/workspace", "/var/tmp", "/tmp", "/dev/shm"):
        failed = await shell(connection, f"cat /dev/zero >{place}/f")
        assert (failed.exited.reason, failed.code) == (ExitReason.EXITED, 1)
        root = "/" if place in ("/workspace", "/var/tmp") else place
        assert failed.exited.detail.startswith(f"DISK_FULL: no space is left in {root}, which holds 8")
        filled = await shell(connection, f"cat /dev/zero >>{place}/f || true; stat -c %s {place}/f")
        assert filled.exited.detail == "", "it did not fail"
        assert b"No space left on device" in filled.stderr, place
        assert 0 < int(filled.stdout) <= 8 << 20
        with pytest.raises(FileFailed, match="ENOSPC"):
            await connection.files.write(place.encode() + b"/g", pieces(bytes(8 << 20)), 0o600)
        assert (
            await shell(connection, f"rm {place}/f && echo more >{place}/h && ls {place}")
        ).stdout.endswith(b"h\n")
        assert (await shell(connection, "exit 3")).exited.detail == "", "there is room again"


async def test_without_control_groups_each_sandbox_still_counts_its_own_processes(tmp_path: Path) -> None:
    options = NamespaceOptions(cgroup_root=tmp_path / "none")
    backend = NamespaceBackend(tmp_path / "state", options)
    await backend.open()
    try:
        capabilities = backend.capabilities()
        assert capabilities.enforced_limits == {"disk", "open_files", "pids"}
        assert "RLIMIT_NPROC" in capabilities.notes[0]
        template = replace(TEMPLATE, limits=Limits(pids=8))
        boxes = [await backend.create(f"n{n}", template) for n in range(4)]
        six = "for n in 1 2 3 4 5 6; do sleep 0.5 & done; wait; echo all"
        outcomes = await asyncio.gather(*(shell(box, six) for box in boxes))
        assert [outcome.stdout for outcome in outcomes] == [b"all\n"] * 4
        more = await shell(boxes[0], "for n in $(seq 20); do sleep 1 & done; wait", timeout=20)
        assert b"fork" in more.stderr.lower()
    finally:
        await backend.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a small tmpfs")
async def test_a_host_short_of_disk_refuses_starts_by_name(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", small], check=True)  # noqa: ASYNC221
    try:
        backend = NamespaceBackend(small / "state")
        await backend.open()
        try:
            await backend.create("first", TEMPLATE)
            (small / "filler").write_bytes(bytes(40 << 20))
            with pytest.raises(StartFailed, match=r"DISK_FULL: [34][0-9] MiB are left") as refused:
                await backend.create("second", TEMPLATE)
            assert (refused.value.retryable, refused.value.metadata["host"]) == (True, "DISK_FULL")
            (small / "filler").unlink()
            await backend.create("second", TEMPLATE)
        finally:
            await backend.close()
    finally:
        subprocess.run(["umount", small], check=True)  # noqa: ASYNC221


async def test_a_layer_in_memory_is_forked_too(backend: NamespaceBackend) -> None:
    template = replace(TEMPLATE, limits=Limits(disk_bytes=8 << 20))
    source = await backend.create("source", template)
    assert (await shell(source, "echo before > state; head -c 1000000 /dev/zero > large")).code == 0
    forks = await backend.branch("source", template, "b")
    assert (await shell(source, "echo after > state")).code == 0
    fork = await backend.create("fork", forks)
    assert (await shell(fork, "cat state; stat -c %s large")).stdout == b"before\n1000000\n"
    # The fork has a bound of its own, for what it writes itself.
    assert (await shell(fork, "head -c 9000000 /dev/zero > more")).code != 0
    for name in ("source", "fork"):
        await backend.destroy(name)
    await backend.prune("b")
