"""Sandboxes whose commands have users: what root may there, how it ends, what its first process stands."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.backends.base import Connection
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import FileFailed, StartFailed
from sandboxd.types import Command, Exited, ExitReason, Limits, Started, Template

from .backend_kit import execute, processes_with, read, shell
from .namespace_kit import opened, skip_without_users

pytestmark = pytest.mark.anyio
TEMPLATE = Template("t", users=True)
STATUS = "grep -h -e ^Cap -e ^NoNewPrivs -e ^Seccomp: -e ^Uid -e ^Groups /proc/{}/status"


@pytest.fixture
async def box(backend: NamespaceBackend) -> AsyncIterator[Connection]:
    skip_without_users(backend)
    connection = await backend.create("one", TEMPLATE)
    yield connection
    await connection.close()
    await backend.destroy("one")


async def status(box: Connection, pid: str, user: str) -> dict[str, str]:
    lines = (await shell(box, STATUS.format(pid), user=user)).stdout.decode().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


async def test_only_the_first_process_may_change_users(box: Connection, backend: NamespaceBackend) -> None:
    none = {f"Cap{kind}": "0" * 16 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
    for user, number in (("", 1000), ("root", 0), ("4711", 4711)):
        found = await status(box, "self", user)
        assert found == {
            **none,
            "NoNewPrivs": "1",
            "Seccomp": "2",
            "Uid": "\t".join([str(number)] * 4),
            "Groups": "0" if user else "",
        }
    first = await status(box, "1", "root")
    kept = f"{0b1110_0000:016x}"
    assert first == {**found, "CapPrm": kept, "CapEff": kept, "Uid": "\t".join(["1000"] * 4), "Groups": ""}
    plain = await backend.create("plain", replace(TEMPLATE, users=False))
    assert await status(plain, "1", "") == {**first, **none}


PTRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for pid in sys.argv[1:]:
    if libc.ptrace(16, int(pid), 0, 0):
        print(os.strerror(ctypes.get_errno()))
"""
GAIN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
sets = (ctypes.c_uint32 * 6)(*[0xE0] * 6)
if libc.capset(header, sets):
    print(os.strerror(ctypes.get_errno()))
"""
ATTEMPTS = [
    # What only a capability allows.
    ("mount -t tmpfs none /tmp", "permission denied"),
    ("mount -o remount,rw /usr", "permission denied"),
    ("chown 1000 /etc/passwd", "Operation not permitted"),
    ("chgrp 1000 /etc/passwd", "Operation not permitted"),
    ("chmod 777 /workspace", "Operation not permitted"),
    ("touch /workspace/mine", "Permission denied"),
    ("cat /tmp/private", "Permission denied"),
    ("mknod /tmp/disk b 8 0", "Operation not permitted"),
    ("chroot /tmp true", "Operation not permitted"),
    ("python3 -c 'import os; os.setuid(1000)'", "Operation not permitted"),
    ("python3 -c 'import os; os.setgroups([1000])'", "Operation not permitted"),
    (f'python3 -c "{GAIN}" && false', "Operation not permitted"),
    ("python3 -c 'import socket; socket.socket(2, 3, 1)'", "Operation not permitted"),
    ("python3 -c 'import socket; socket.socket().bind((\"\", 80))'", "Permission denied"),
    # What is the host's.
    ("touch /usr/bin/mine", "Read-only file system"),
    ("chmod 777 /dev", "Read-only file system"),
    ("chmod 666 /dev/null", "Operation not permitted"),
    ("echo x > /proc/sys/kernel/core_pattern", "Read-only file system"),
    ("echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start", "Read-only file system"),
    # What is the first process's, whose files in /proc have root's number.
    ("cat /proc/1/environ", "Permission denied"),
    ("cat /proc/1/mem", "Permission denied"),
    ("cat /proc/1/maps", "Permission denied"),
    ("cat /proc/1/auxv", "Permission denied"),
    ("cat /proc/1/fd/3", "Permission denied"),
    ("readlink /proc/1/fd/3 || readlink -v /proc/1/fd/3", "Permission denied"),
    ("ls /proc/1/root/", "Permission denied"),
    ("ls /proc/1/cwd/", "Permission denied"),
    ("readlink -v /proc/1/ns/user", "Permission denied"),
    ("echo 1000 > /proc/1/oom_score_adj", "Read-only file system"),
    ("nsenter --target 1 --mount true", "Permission denied"),
    ("python3 -c 'import os; os.kill(1, 9)'", "Operation not permitted"),
    ("python3 -c 'import resource; resource.prlimit(1, 7, (0, 0))'", "Operation not permitted"),
    (f'python3 -c "{PTRACE}" 1 && false', "Operation not permitted"),
    # And another user's.
    ("python3 -c 'import os; os.kill(OTHER, 9)'", "Operation not permitted"),
    (f'python3 -c "{PTRACE}" OTHER && false', "Operation not permitted"),
    ("cat /proc/OTHER/environ", "Permission denied"),
]


async def test_root_is_a_user_without_rights_over_others(box: Connection) -> None:
    await shell(box, "umask 077; echo x >/tmp/private; sleep 600 </dev/null >/dev/null 2>&1 &")
    other = (await shell(box, "grep -lx sleep /proc/[0-9]*/comm | cut -d/ -f3")).stdout.decode().strip()
    for attempt, refusal in ATTEMPTS:
        script = f"{{ {attempt.replace('OTHER', other)}\n}} 2>&1 && echo DONE"
        done = await shell(box, script, user="root")
        assert refusal in done.stdout.decode(), (attempt, done.stdout)
        assert b"DONE" not in done.stdout, attempt
    # What it owns it has: the directories of the system, and its own.
    own = "echo x >/etc/mine && mkdir /opt/mine && cd && pwd && rm -r /etc/mine /opt/mine"
    assert (await shell(box, own, user="root")).stdout == b"/root\n"


async def test_no_bit_of_a_file_makes_anybody_root(box: Connection) -> None:
    python = "/tmp/as-root"
    make = f"cp $(readlink -f $(command -v python3)) {python}; chmod 6755 {python}; ls -l {python}"
    assert (await shell(box, make, user="root")).stdout.startswith(b"-rwsr-sr-x")
    who = f"{python} -c 'import os; print(os.getresuid(), os.getresgid())'"
    assert (await shell(box, who, user="4711:4711")).stdout == b"(4711, 4711, 4711) (4711, 4711, 4711)\n"


SURVIVORS = (
    "(setsid sleep 771 </dev/null >/dev/null 2>&1 &);"
    " python3 -c 'import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0);"
    ' os.execvpe("sleep", ["sleep", "772"], {})\' </dev/null >/dev/null 2>&1;'
    " trap '' TERM INT HUP; echo on; sleep 773"
)


async def test_what_root_started_ends_with_its_command_alone(box: Connection) -> None:
    """Each command's processes are found by a mark, which of other users' processes only a file tells."""
    beside = Command((b"sh", b"-c", b"setsid sleep 770"), user="root", id="beside", detached=True)
    async with box.exec(beside) as running:
        assert isinstance(await anext(aiter(running)), Started)
    ended = await shell(box, SURVIVORS, user="root", timeout=1.0)
    assert ended.exited.reason is ExitReason.TIMED_OUT
    assert ended.exited.detail == ""
    assert {line.strip() for line in await processes_with(box, "sleep")} >= {b"sleep 770"}
    for number in (771, 772, 773):
        assert await processes_with(box, f"sleep {number}") == []
    # The same when the caller leaves, at the limit of its output, and when it is forgotten.
    async with box.exec(Command((b"sh", b"-c", SURVIVORS.encode()), user="4711")) as running:
        async for event in running:
            if b"on" in getattr(event, "data", b""):
                break
    async with asyncio.timeout(20):
        while await processes_with(box, "sleep 773"):
            pass
    too_much = await shell(box, "setsid yes", user="root", output_limit=100)
    assert too_much.exited.reason is ExitReason.OUTPUT_LIMIT_EXCEEDED
    await box.commands.signal("beside", signal.SIGTERM)
    await box.commands.forget("beside")
    async with asyncio.timeout(20):
        while await processes_with(box, "sleep 770"):
            pass


async def test_a_signal_reaches_another_users_command(box: Connection) -> None:
    async with box.exec(Command((b"sleep", b"600"), user="root", id="named")) as running:
        assert isinstance(await anext(aiter(running)), Started)
        await box.commands.signal("named", signal.SIGUSR1)
        ended = await anext(aiter(running))
    assert isinstance(ended, Exited)
    assert (ended.reason, ended.signal) == (ExitReason.SIGNALED, signal.SIGUSR1)


async def test_all_users_of_a_sandbox_share_its_processes(backend: NamespaceBackend) -> None:
    skip_without_users(backend)
    box = await backend.create("one", replace(TEMPLATE, limits=Limits(pids=20)))
    await shell(box, "for n in 1 2 3 4 5 6 7 8 9 10; do sleep 600 </dev/null >/dev/null 2>&1 & done")
    bomb = await shell(box, "for n in 1 2 3 4 5 6 7 8 9 10; do sleep 5 & done; wait", user="root", timeout=30)
    assert b"fork" in bomb.stderr.lower()
    # What is left of them ends with the sandbox, whoever it was.
    first = await backend.pid_of("one")
    await shell(box, SURVIVORS.partition(" trap")[0], user="root")
    await backend.destroy("one")
    assert not Path(f"/proc/{first}").exists()


async def test_no_file_of_users_holds_up_or_ends_the_first_process(box: Connection) -> None:
    for make, why in (
        ("mkfifo /etc/passwd", "/etc/passwd: not a regular file"),
        ("mkdir /etc/passwd", "/etc/passwd: not a regular file"),
        ("ln -s /dev/zero /etc/passwd", "/etc/passwd: not a regular file"),
        ("ln -s passwd /etc/passwd", "/etc/passwd: Too many levels of symbolic links"),
        ("head -c 1100000 /dev/zero | tr '\\000' a >/etc/passwd", "/etc/passwd: longer than 1 MiB"),
        ("echo me:x:1:1 >/etc/passwd; chmod 0 /etc/passwd", "/etc/passwd: Permission denied"),
        ("head -c 1000000 /dev/zero >/etc/passwd", "not in /etc/passwd"),
        ("head -c 900000 /dev/urandom >/etc/passwd", "not in /etc/passwd"),
        ("echo me:x:1:1 >/etc/passwd; rm /etc/group; mkfifo /etc/group", "/etc/group: not a regular file"),
        (
            "rm -r /etc/group; for n in $(seq 300); do echo g:x:$n:me; done >/etc/group",
            "in more groups than a command may have, which are 256",
        ),
    ):
        ready = await shell(box, f"rm -rf /etc/passwd; {make}" if "group" not in make else make, user="0:0")
        assert ready.code == 0, (make, ready.stderr)
        async with asyncio.timeout(20):
            ended = (await execute(box, Command((b"true",), user="me"))).exited
        assert (ended.reason, ended.detail) == (ExitReason.NOT_STARTED, f"user me: {why}"), make


async def test_roots_files_fork_and_go_as_others_do(box: Connection, backend: NamespaceBackend) -> None:
    """A reset leaves nothing of them, either; and the daemon reads as the sandbox's own user."""
    hidden = "umask 077; mkdir /srv/hidden; echo x >/srv/hidden/file; cp /srv/hidden/file /workspace.txt"
    await shell(box, hidden, user="root")
    with pytest.raises(FileFailed, match="Permission denied"):
        await read(box, b"/workspace.txt")
    fork = await backend.create("two", await backend.branch("one", TEMPLATE, "b"))
    look = "stat -c %u:%a /srv/hidden/file /workspace.txt"
    assert (await shell(fork, look, user="root")).stdout == b"0:600\n0:600\n"
    await fork.close()
    anew = await backend.reset("two", "three", TEMPLATE)
    assert (await shell(anew, "ls /srv/hidden /workspace.txt", user="root")).stdout == b""
    await anew.close()
    await backend.destroy("three")
    await backend.prune("b")


async def test_where_nobody_counts_all_processes_together_there_is_one_user(tmp_path: Path) -> None:
    """As for an ordinary user's daemon, whose sandboxes have no users to give."""
    async with opened(tmp_path / "state", NamespaceOptions(cgroup_root=tmp_path / "none")) as backend:
        with pytest.raises(StartFailed, match="a control group that counts processes") as raised:
            await backend.prepare(TEMPLATE)
        assert not raised.value.retryable
        with pytest.raises(StartFailed, match="or leave `users` out"):
            await backend.create("one", TEMPLATE)
        assert await backend.list_ids() == []


async def test_the_first_process_still_dies_with_its_parent(backend: NamespaceBackend) -> None:
    """To make another user's pipes it changes whose its files are; the kernel then forgets what ends it."""
    skip_without_users(backend)
    box = await backend.create("one", TEMPLATE)
    await shell(box, "true", user="root")
    first = await backend.pid_of("one")
    # So that it hears of nothing itself.
    os.kill(first, signal.SIGSTOP)
    parent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    end = os.pidfd_open(first)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(end, ended.set)
    try:
        os.kill(parent, signal.SIGKILL)
        async with asyncio.timeout(20):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(end)
        if not ended.is_set():
            signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)
