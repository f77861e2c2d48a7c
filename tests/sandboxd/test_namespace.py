"""The namespace backend on this host's kernel: what confines a sandbox, how it dies, what stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends import bare
from sandboxd.backends.channel import dial
from sandboxd.backends.launching import end_of
from sandboxd.backends.link import Link
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import BackendUnavailable, FileFailed, FileNotFound, SandboxLost, StartFailed
from sandboxd.types import Command, Network, Template

from .backend_kit import execute, pieces, read, shell
from .namespace_kit import NOT_MAPPED, launcher_and_keeper, leftovers

pytestmark = pytest.mark.anyio
TEMPLATE = Template("t")


async def text(backend: NamespaceBackend, script: str, template: Template = TEMPLATE) -> str:
    """What a script prints in a sandbox of its own, both streams, without the last newline."""
    name = f"t{os.urandom(6).hex()}"
    connection = await backend.create(name, template)
    try:
        outcome = await shell(connection, f"{{ {script}\n}} 2>&1")
        return outcome.stdout.decode().rstrip("\n")
    finally:
        await backend.destroy(name)


async def test_a_sandbox_has_no_privilege(backend: NamespaceBackend) -> None:
    status = await text(backend, "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert fields["Uid"].split() == ["1000"] * 4
    assert (
        await text(backend, "id -un; pwd; echo $HOME; hostname") == "sandbox\n/workspace\n/workspace\nsandbox"
    )


async def test_nothing_of_the_host_is_inside(backend: NamespaceBackend, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert "No such file" in await text(backend, f"cat {tmp_path / 'secret'}")
    assert await text(backend, "ls /root /home /srv /state /old 2>/dev/null | grep -v :") == ""
    processes = await text(backend, "cat /proc/[0-9]*/comm")
    assert set(processes.split()) == {"sandboxd-guest", "sh"}
    assert await text(backend, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo"
    assert (
        await text(backend, "env | cut -d= -f1 | grep -v -x -e PATH -e HOME -e LANG -e PWD -e _ -e OLDPWD")
        == ""
    )
    assert await text(backend, "ls /proc/self/fd") == "0\n1\n2\n3"
    assert await text(backend, "tr '\\0' ' ' < /proc/1/cmdline | sed 's/ *$//'") == "sandboxd-guest"
    assert "No such file" in await text(backend, "ls /etc/shadow")


PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace(16, 1, 0, 0) and print(os.strerror(ctypes.get_errno()))
"""


@pytest.mark.parametrize(
    ("attempt", "refusal"),
    [
        ("mount -t tmpfs none /tmp", "must be superuser"),
        ("unshare --user true", "Operation not permitted"),
        ("unshare --net true", "Operation not permitted"),
        ("nsenter --target 1 --mount true", "Permission denied"),
        ("ls -l /proc/1/root/", "Permission denied"),
        ("cat /proc/1/environ", "Permission denied"),
        ("cat /proc/1/mem", "Permission denied"),
        ("ls -l /proc/1/fd/", "Permission denied"),
        ("echo x > /proc/sys/kernel/core_pattern", "Read-only file system"),
        ("echo 1 > /proc/sys/vm/drop_caches", "Read-only file system"),
        ("touch /usr/bin/mine", "Read-only file system"),
        ("mknod /tmp/disk b 8 0", "Operation not permitted"),
        ("chroot /tmp true", "Operation not permitted"),
        ("hostname other", "must be root"),
        ("date -s 2001-01-01", "Operation not permitted"),
        ("dmesg", "Operation not permitted"),
        ("chown root /workspace", NOT_MAPPED),
        ("ls /sys/fs/cgroup", "No such file"),
        ("python3 -c 'import socket; socket.socket(2, 3, 1)'", "Operation not permitted"),
        (f'python3 -c "{PTRACE}" && false', "Operation not permitted"),
        ("ln /usr/bin/env /workspace/mine", "Invalid cross-device link"),
        ("echo 1000 > /proc/1/oom_score_adj", "Read-only file system"),
        ("echo 0 0 1 > /proc/self/uid_map", "Read-only file system"),
        ("mount -o remount,rw /usr", "must be superuser"),
    ],
)
async def test_attempts_to_leave_are_refused(backend: NamespaceBackend, attempt: str, refusal: str) -> None:
    answer = await text(backend, f"{attempt} && echo DONE")
    assert refusal in answer
    assert "DONE" not in answer


async def test_the_hosts_sockets_and_processes_are_out_of_reach(backend: NamespaceBackend) -> None:
    name = f"sandboxd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        assert "Connection refused" in await text(backend, f'python3 -c "{connect}"')
        hosted = replace(TEMPLATE, network=Network.HOST)
        assert await text(backend, f'python3 -c "{connect}"', hosted) == "", "the guard is the network"
    assert "No such process" in await text(backend, f"kill -0 {os.getpid()}")
    assert await text(backend, "kill -9 -1 2>/dev/null; echo alive") == "alive"


BELOW = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
namespace = os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY)
for step in (libc.setns(namespace, 0x20000), libc.umount2(b"/", 2), libc.setns(namespace, 0x20000)):
    assert step == 0, os.strerror(ctypes.get_errno())
print([(path, os.listdir(path)) for path in ("/t", "/m")], sorted(os.listdir("/")), os.path.exists("/proc"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look below a sandbox's root")
async def test_nothing_of_the_host_is_below_the_root(backend: NamespaceBackend) -> None:
    connection = await backend.create("below", TEMPLATE)
    try:
        # Without the sandbox's own root, which no process inside could take away.
        argv = [sys.executable, "-c", BELOW, str(await backend.pid_of("below"))]
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=20)
        assert done.stdout == "[('/t', []), ('/m', [])] ['m', 'proc', 't'] False\n", done.stderr
    finally:
        await connection.close()
        await backend.destroy("below")


async def test_paths_lead_nowhere_but_inside(backend: NamespaceBackend, tmp_path: Path) -> None:
    """Links and dots that the sandbox made are followed by its own guest, in its own root."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    connection = await backend.create("paths", TEMPLATE)
    await shell(connection, f"ln -s {secret} link; ln -s /etc/passwd inside; ln -s / root; mkfifo pipe")
    for path in (b"link", b"../../../../../.." + os.fsencode(secret), b"root" + os.fsencode(secret)):
        with pytest.raises(FileNotFound):
            await read(connection, path)
    assert b"sandbox:x:1000" in await read(connection, b"inside")
    with pytest.raises(FileFailed, match="not a regular file"):
        await read(connection, b"pipe")
    if os.geteuid() == 0:  # An ordinary user has one number to give, and the sandbox owns its copy of all.
        with pytest.raises(FileFailed, match="Permission denied"):
            await connection.files.write(b"root/etc/passwd", pieces(b"mine"), 0o644)
    assert await connection.files.write(b"link", pieces(b"mine"), 0o644) == 4
    assert secret.read_text() == "x"


SYSTEM_CALLS = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
limit = ctypes.byref((ctypes.c_ulong * 2)(1, 1))
arm = platform.machine() == "aarch64"
for name, x86, a64, arguments in (
    ("unshare user", 272, 97, (0x10000000,)), ("clone user", 56, 220, (0x10000011, 0, 0, 0, 0)),
    ("clone3", 435, 435, (0, 0)), ("keyctl", 250, 219, (0, -3, 0)), ("bpf", 321, 280, (0, 0, 0)),
    ("perf", 298, 241, (0, 0, -1, -1, 0)), ("userfaultfd", 323, 282, (0,)), ("io_uring", 425, 425, (1, 0)),
    ("by handle", 304, 265, (-100, 0, 0)), ("setns", 308, 268, (0, 0)), ("pivot_root", 155, 41, (0, 0)),
    ("vsock", 41, 198, (40, 1, 0)), ("packet", 41, 198, (17, 3, 0)), ("tiocsti", 16, 29, (0, 0x5412, 0)),
    ("init_module", 175, 105, (0, 0, 0)), ("prlimit mark", 302, 261, (0, 15, limit, 0)),
    ("setrlimit mark", 160, 164, (15, limit)), ("mark pid 1", 302, 261, (1, 15, limit, 0)),
    ("limit pid 1", 302, 261, (1, 7, limit, 0, 1, 2)), ("guess", 302, 261, (0, 15, limit, 0, 1, 2)),
    ("affinity", 203, 122, (1, 8, limit)), ("scheduler", 144, 119, (1, 3, limit)),
    ("renice", 141, 140, (0, 1, 19)), ("renice group", 141, 140, (1, 1, 19)),
    ("renice all", 141, 140, (2, 0, 19)), ("ioprio", 251, 30, (1, 1, 24576)),
    ("vsock pair", 53, 199, (40, 1, 0, limit)),
):
    result = libc.syscall(a64 if arm else x86, *arguments)
    if result == 0 and name.startswith("clone"):
        os._exit(0)
    print(name, result, os.strerror(ctypes.get_errno()) if result < 0 else "-", sep=": ")
"""


async def test_the_filter_refuses_what_it_lists(backend: NamespaceBackend) -> None:
    connection = await backend.create("calls", TEMPLATE)
    outcome = await execute(connection, Command(argv=(b"python3", b"-c", SYSTEM_CALLS.encode())))
    lines = outcome.stdout.decode().splitlines()
    assert len(lines) == 27, outcome.stderr
    expected = {"clone3": "Function not implemented", "vsock": "Address family not supported by protocol"}
    expected["packet"] = expected["vsock pair"] = expected["vsock"]
    for line in lines:
        name = line.split(":")[0]
        assert line == f"{name}: -1: {expected.get(name, 'Operation not permitted')}"


async def test_loopback_works_and_ordinary_programs_do(backend: NamespaceBackend) -> None:
    script = (
        "import socket, threading, subprocess, tempfile, os\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "threading.Thread(target=lambda: s.accept()[0].sendall(b'hi')).start()\n"
        "print(socket.create_connection(s.getsockname()).recv(2))\n"
        "print(subprocess.run(['sh', '-c', 'echo $((1+1))'], capture_output=True).stdout)\n"
        "m, t = os.openpty(); print(os.ttyname(t)[:9])\n"
        "import multiprocessing; print(multiprocessing.Pool(2).map(abs, [-1, -2]))\n"
    )
    connection = await backend.create("programs", TEMPLATE)
    outcome = await execute(connection, Command(argv=(b"python3", b"-c", script.encode())))
    assert outcome.stdout == b"b'hi'\nb'2\\n'\n/dev/pts/\n[1, 2]\n", outcome.stderr


async def test_the_hosts_network_only_when_the_template_says_so(backend: NamespaceBackend) -> None:
    ours = str(Path("/proc/self/ns/net").readlink())
    assert await text(backend, "readlink /proc/self/ns/net") != ours
    assert await text(backend, "readlink /proc/self/ns/net", replace(TEMPLATE, network=Network.HOST)) == ours


async def test_orphans_are_reaped(backend: NamespaceBackend) -> None:
    connection = await backend.create("orphans", TEMPLATE)
    await shell(connection, "for n in $(seq 200); do (sh -c 'true &' &); done; wait")
    async with asyncio.timeout(20):
        while (await shell(connection, "grep -l '^State:.Z' /proc/[0-9]*/status")).stdout:
            continue  # Each look is a command of its own.


async def test_the_working_directory_is_made(backend: NamespaceBackend) -> None:
    template = replace(TEMPLATE, cwd=b"/data/work")
    assert await text(backend, "pwd; touch mine && ls", template) == "/data/work\nmine"


async def test_read_only_paths_are_seen(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("seen\n")
    for directory in (tmp_path, *tmp_path.parents):
        if str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    backend = NamespaceBackend(tmp_path / "state", NamespaceOptions(read_only_paths=(shared,)))
    await backend.open()
    try:
        answer = await text(backend, f"cat {shared}/file; touch {shared}/mine")
        assert answer.startswith("seen\n")
        assert "Read-only file system" in answer
    finally:
        await backend.close()


async def test_a_sandbox_that_dies_is_lost_with_its_cause(backend: NamespaceBackend) -> None:
    connection = await backend.create("dies", TEMPLATE)
    lost = asyncio.create_task(connection.wait_lost())
    async with connection.exec(Command(argv=(b"sleep", b"60"))) as events:
        await anext(aiter(events))
        os.kill(await backend.pid_of("dies"), signal.SIGKILL)
        with pytest.raises(SandboxLost, match="killed by signal 9"):
            await anext(aiter(events))
    assert "killed by signal 9" in await asyncio.wait_for(lost, 20)
    with pytest.raises(SandboxLost):
        await connection.ping()
    await backend.destroy("dies")


async def test_a_name_is_taken_once(backend: NamespaceBackend) -> None:
    connection = await backend.create("same", TEMPLATE)
    with pytest.raises(StartFailed, match="taken"):
        await backend.create("same", TEMPLATE)
    await connection.ping()


async def test_what_a_sandbox_piles_up_is_removed(backend: NamespaceBackend) -> None:
    connection = await backend.create("pile", TEMPLATE)
    deep = "for n in $(seq 300); do mkdir d && cd d || exit 1; done; touch deepest"
    assert (await shell(connection, deep)).code == 0
    assert (await shell(connection, "mkdir shut && touch shut/file && chmod 000 shut")).code == 0
    assert (await shell(connection, "ln -s / root; ln -s ../../.. up")).code == 0
    await connection.files.write(b"file", pieces(b"x" * 100_000), 0o400)
    await backend.destroy("pile")
    assert await backend.list_ids() == []


async def test_what_cannot_be_made_is_refused_with_the_way_out(backend: NamespaceBackend) -> None:
    with pytest.raises(StartFailed, match="docker backend") as caught:
        await backend.create("image", replace(TEMPLATE, image="python:3"))
    assert not caught.value.retryable
    with pytest.raises(StartFailed, match="Read-only") as caught:
        await backend.create("place", replace(TEMPLATE, cwd=b"/usr/work"))
    assert await backend.list_ids() == []


async def test_the_launchers_death_ends_everything_and_a_new_one_comes(backend: NamespaceBackend) -> None:
    connections = [await backend.create(f"n{n}", TEMPLATE) for n in range(3)]
    guests = [await backend.pid_of(f"n{n}") for n in range(3)]
    assert backend.launcher_pid is not None
    os.kill(backend.launcher_pid, signal.SIGKILL)
    for connection in connections:
        assert "launcher" in await asyncio.wait_for(connection.wait_lost(), 20)
        with pytest.raises(SandboxLost):
            await shell(connection, "true")
    for n in range(3):
        await backend.destroy(f"n{n}")
    for pid in guests:
        assert not Path(f"/proc/{pid}").exists()
    await (await backend.create("again", TEMPLATE)).ping()
    assert await backend.list_ids() == ["again"]


async def test_the_starters_death_ends_everything_as_the_launchers_does(backend: NamespaceBackend) -> None:
    connection = await backend.create("lost", TEMPLATE)
    guest = await backend.pid_of("lost")
    starter = int(Path(f"/proc/{guest}/stat").read_text().rpartition(")")[2].split()[1])
    assert Path(f"/proc/{starter}/comm").read_text() == "sandboxd-starte\n"
    os.kill(starter, signal.SIGKILL)
    assert "launcher" in await asyncio.wait_for(connection.wait_lost(), 20)
    await backend.destroy("lost")
    assert not Path(f"/proc/{guest}").exists()
    await (await backend.create("again", TEMPLATE)).ping()


async def test_a_sandbox_may_be_destroyed_before_it_has_begun(
    backend: NamespaceBackend, tmp_path: Path
) -> None:
    sock = await dial(tmp_path / "state" / "launcher.sock")
    link = Link(*await asyncio.open_unix_connection(sock=sock))
    order: dict[str, Any] = {
        "id": "early",
        "cwd": "/workspace",
        "limits": {},
        "host_network": False,
        "host_system": True,
    }
    nothing: dict[str, Any] = {"image": "", "layers": [], "branches": []}
    answers = await asyncio.gather(
        link.ask("create", **order, **nothing),
        link.ask("create", **order, **nothing),
        link.ask("destroy", id="early"),
        link.ask("destroy", id="early"),
    )
    assert [answer.get("error") for answer in answers] == [None, "the name is taken", None, None]
    assert await backend.list_ids() == []
    await link.close()


async def test_another_daemon_finds_the_launcher(backend: NamespaceBackend, tmp_path: Path) -> None:
    await backend.create("orphan", TEMPLATE)
    heir = NamespaceBackend(tmp_path / "state")
    await heir.open()
    assert heir.launcher_pid == backend.launcher_pid
    assert await heir.list_ids() == ["orphan"]
    await heir.destroy("orphan")
    assert await backend.list_ids() == []
    await heir.close()


async def test_without_a_daemon_the_launcher_ends_after_its_grace(tmp_path: Path) -> None:
    state = tmp_path / "state"
    backend = NamespaceBackend(state, NamespaceOptions(grace_seconds=0.2))
    await backend.open()
    await backend.create("left", TEMPLATE)
    ends = [end_of(pid) for pid in launcher_and_keeper(backend)]
    await backend.let_go()
    await asyncio.wait_for(asyncio.gather(*ends), 20)
    assert leftovers(state) == []
    assert sorted(path.name for path in state.iterdir()) == ["launcher.lock", "launcher.log"]
    await backend.close()


async def test_a_state_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable, match="file/state"):
        await NamespaceBackend(tmp_path / "file" / "state").open()


def test_the_launcher_loads_little_and_nothing_of_what_runs_in_sandboxes() -> None:
    command = bare.command(sys.executable, "sandboxd.backends.keeper")
    loads = [word.replace("sys.modules[name].main()", "print(*sys.modules)") for word in command]
    assert loads != command
    loaded = set(subprocess.run(loads, capture_output=True, text=True, check=True).stdout.split())
    assert "sandboxd.backends.launcher" in loaded
    assert [name for name in loaded if name.startswith("sandboxd.guest")] == []
    heavy = {
        "typing",
        "dataclasses",
        "inspect",
        "ast",
        "traceback",
        "contextlib",
        "platform",
        "asyncio",
        "grpc",
    }
    assert loaded & heavy == set()
