"""Ways out of a sandbox by the host's own files: its switches, its devices, the sockets of what made it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.types import Command, Template

from .backend_kit import execute, shell
from .namespace_kit import NOT_MAPPED

pytestmark = pytest.mark.anyio
TEMPLATE = Template("t")
MASKED_IF_THERE = ("/proc/kmsg", "/proc/keys", "/proc/timer_list", "/proc/acpi", "/proc/bus", "/proc/irq")


ATTEMPTS = [
    # What the host has and a sandbox must not: the guard is that it is not there at all.
    ("echo b > /proc/sysrq-trigger", "nonexistent"),
    ("cat /proc/kcore", "No such file"),
    ("cat /dev/mem", "No such file"),
    ("ls /dev/kmsg /dev/fuse /dev/kvm /dev/net/tun", "No such file"),
    ("echo /tmp/x > /sys/fs/cgroup/memory/release_agent", "nonexistent"),
    ("echo 1 > /sys/fs/cgroup/cgroup.procs", "nonexistent"),
    ("echo never > /sys/kernel/mm/transparent_hugepage/enabled", "nonexistent"),
    ("ls /sys/class /sys/kernel /sys/module /sys/block", "No such file"),
    # What is there, and refused.
    ("echo 0 > /proc/sys/kernel/randomize_va_space", "Read-only file system"),
    ("echo +1000 > /proc/1/timerslack_ns", "Read-only file system"),
    ("ls /proc/1/cwd/", "Permission denied"),
    ("cat /proc/1/maps", "Permission denied"),
    ("python3 -c 'import time; time.clock_settime(time.CLOCK_REALTIME, 0)'", "Operation not permitted"),
    ("python3 -c 'import os; os.setuid(0)'", NOT_MAPPED),
    ("python3 -c 'import os; os.setgroups([0])'", "Operation not permitted"),
    ("cp /bin/sh s && chmod 6755 s && python3 -c 'import os; os.setresuid(0, 0, 0)'", "not permitted"),
]


async def test_the_hosts_switches_are_out_of_reach(backend: NamespaceBackend) -> None:
    connection = await backend.create("one", TEMPLATE)
    for attempt, refusal in ATTEMPTS:
        done = await shell(connection, f"{{ {attempt}\n}} 2>&1 && echo DONE")
        assert refusal in done.stdout.decode(), attempt
        assert b"DONE" not in done.stdout, attempt


async def test_what_proc_tells_of_the_host_is_covered(backend: NamespaceBackend) -> None:
    """Each of them is there on the host, or there would be nothing to cover."""
    connection = await backend.create("one", TEMPLATE)
    there = [path for path in MASKED_IF_THERE if Path(path).exists()]
    assert there
    for path in there:
        look = "ls -A" if Path(path).is_dir() else "cat"
        done = await shell(connection, f"{look} {path}")
        assert (done.stdout, done.code) == (b"", 0), path
    # Nothing that hosts keep apart by number shows whose sandbox it is.
    groups = (await shell(connection, "cut -d: -f3 /proc/self/cgroup | sort -u")).stdout
    assert groups == b"/\n"


CONNECT = """
import os, socket, sys
for path in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("reached", path)
    except OSError as error:
        print(os.strerror(error.errno))
for line in open("/proc/net/unix").read().splitlines()[1:]:
    print("listens", line.split()[-1])
"""


def _sockets(state: Path) -> list[str]:
    files = (Path(directory, name) for directory, _, names in os.walk(state) for name in names)
    return [str(path) for path in files if stat.S_ISSOCK(path.lstat().st_mode)]


async def test_the_sockets_of_launcher_and_guests_are_out_of_reach(
    backend: NamespaceBackend, tmp_path: Path
) -> None:
    """Those by which a daemon reaches its launcher and another sandbox answer outside, and not inside."""
    other = await backend.create("other", TEMPLATE)
    connection = await backend.create("one", TEMPLATE)
    try:
        sockets = _sockets(tmp_path)
        assert sockets
        for path in sockets:
            with socket.socket(socket.AF_UNIX) as outside:
                outside.settimeout(20)
                await asyncio.to_thread(outside.connect, path)
        argv = (b"python3", b"-c", CONNECT.encode(), *map(os.fsencode, sockets))
        done = await execute(connection, Command(argv=argv))
        assert done.stdout == b"No such file or directory\n" * len(sockets), done
    finally:
        await other.close()
