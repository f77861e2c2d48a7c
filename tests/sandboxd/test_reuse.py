"""Sandboxes that are leased more than once: under a new name each time, and only if they are as new."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends.base import Connection
from sandboxd.backends.faults import Fault
from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.care import Care
from sandboxd.config import ConfigError, load
from sandboxd.errors import Phase, SandboxdError, SandboxLost, SandboxNotFound
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.portrait import differences, portray
from sandboxd.types import Command, Template

from .backend_kit import execute, shell
from .conftest import settle

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]
TWICE = Care(check_seconds=0.0, max_uses=2)
THRICE = Care(check_seconds=0.0, max_uses=3)


def states(r: Any) -> list[str]:
    return sorted(sandbox.state.name for sandbox in r.pool.sandboxes())


async def ready(r: Any) -> None:
    await r.until(lambda: states(r) == ["WARM"])


async def test_a_released_sandbox_is_leased_again_under_another_name(rig: OpenRig) -> None:
    async with rig(warm=1, size=1, care=THRICE) as r:
        names, created = [], []
        for _ in range(4):
            await ready(r)
            sandbox = await r.pool.acquire()
            names.append(sandbox.id)
            created.append(r.backend.created_total)
            assert sandbox.uses == (1, 2, 3, 1)[len(names) - 1]
            r.pool.release(sandbox.id)
        assert len(set(names)) == 4
        assert created == [1, 1, 1, 2]
        stats = r.pool.stats()
        assert (stats.acquired_total, stats.released_total, stats.reused_total) == (4, 4, 2)
        r.pool.check()


async def test_the_last_holders_calls_reach_nobody(rig: OpenRig) -> None:
    async with rig(warm=1, size=1, care=TWICE) as r:
        await ready(r)
        first = await r.pool.acquire()
        connection = first.connection
        r.pool.release(first.id)
        second = await r.pool.acquire()
        with pytest.raises(SandboxNotFound, match="was released"):
            r.pool.get(first.id)
        with pytest.raises(SandboxNotFound):
            r.pool.renew(first.id)
        r.pool.release(first.id)
        assert r.pool.get(second.id) is second
        with pytest.raises(SandboxLost):
            async with connection.exec(Command((b"true",))) as events:
                _ = [event async for event in events]


async def test_what_a_reset_leaves_behind_is_seen_and_the_sandbox_kept_apart(rig: OpenRig) -> None:
    async with rig(warm=1, size=2, care=TWICE, quarantine=1) as r:
        await r.until(lambda: "WARM" in states(r))
        r.pool.resize(size_limit=1)
        r.faulty.faults = ()
        sandbox = await r.pool.acquire()
        r.faulty.faults = (Fault.parse("stain 1"),)
        r.pool.release(sandbox.id)
        r.pool.resize(size_limit=2)
        await r.until(lambda: states(r) == ["QUARANTINED", "WARM"])
        (failure,) = r.pool.failures()
        assert failure.phase is Phase.RESET
        assert "/tmp is" in failure.message
        assert "stain" in failure.message
        assert r.pool.stats().reused_total == 0
        inspection = await r.pool.inspect(failure.sandbox)
        assert (Path(inspection.place["directory"]) / "tmp" / "stain").read_bytes() == b"left by another"


@pytest.mark.parametrize("fault", ["fail reset 1", "stain 1", "hang reset 1"])
async def test_a_reset_in_doubt_without_a_quarantine_destroys(rig: OpenRig, fault: str) -> None:
    async with rig(warm=1, size=1, care=TWICE, faults=[fault]) as r:
        await ready(r)
        sandbox = await r.pool.acquire()
        r.pool.release(sandbox.id)
        await r.until(lambda: r.clock.advance(1.0) or bool(r.pool.failures()))
        await ready(r)
        assert (await r.pool.acquire()).uses == 1
        assert r.pool.failures()[0].phase is Phase.RESET
        assert len(await r.backend.list_ids()) == 1


async def test_a_pool_that_needs_no_other_resets_none(rig: OpenRig) -> None:
    async with rig(warm=1, size=9, care=TWICE) as r:
        await ready(r)
        sandbox = await r.pool.acquire()
        await r.until(lambda: states(r) == ["ACTIVE", "WARM"])
        r.pool.release(sandbox.id)
        await ready(r)
        assert r.pool.stats().reused_total == 0


async def test_a_lease_that_ran_out_and_a_fork_are_used_once(rig: OpenRig) -> None:
    async with rig(warm=0, size=2, care=TWICE) as r:
        sandbox = await r.pool.acquire()
        (fork,) = await r.pool.fork(sandbox.id, 1, Lease())
        r.pool.resize(warm_target=2)
        r.pool.release(fork.id)
        await r.until(lambda: states(r) == ["ACTIVE", "WARM"])
        await r.advance(61.0)
        await r.until(lambda: states(r) == ["WARM", "WARM"])
        assert r.pool.stats().reused_total == 0


async def test_the_setup_is_run_again(rig: OpenRig) -> None:
    template = Template("p", setup=(b"sh", b"-c", b"echo ready > made"))
    async with rig(warm=1, size=1, care=TWICE, template=template) as r:
        await ready(r)
        sandbox = await r.pool.acquire()
        assert (await shell(sandbox.connection, "echo broken > made; touch more")).code == 0
        r.pool.release(sandbox.id)
        sandbox = await r.pool.acquire()
        assert sandbox.uses == 2
        assert (await shell(sandbox.connection, "cat made; ls")).stdout == b"ready\nmade\n"


async def test_an_end_in_the_middle_of_a_reset_leaves_nothing(rig: OpenRig) -> None:
    async with rig(warm=1, size=1, care=TWICE, faults=["slow reset 1 5.0"]) as r:
        await ready(r)
        sandbox = await r.pool.acquire()
        r.pool.release(sandbox.id)
        await settle()
        assert states(r) == ["RESETTING"]
        assert r.pool.stats().starting == 1


async def test_what_was_made_from_an_earlier_template_is_used_once(rig: OpenRig) -> None:
    async with rig(warm=1, size=1, care=TWICE, faults=["slow reset 1 5.0"]) as r:
        await ready(r)
        sandbox = await r.pool.acquire()
        r.pool.release(sandbox.id)
        await settle()
        assert states(r) == ["RESETTING"]
        options = PoolOptions(Bounds(1, 1, 4, 10), care=TWICE)
        r.pool.reconfigure(Template("p", env={b"NEW": b"1"}), options)
        await ready(r)
        sandbox = await r.pool.acquire()
        assert sandbox.uses == 1
        r.pool.reconfigure(Template("p", env={b"NEW": b"2"}), options)
        r.pool.release(sandbox.id)
        await ready(r)
        sandbox = await r.pool.acquire()
        assert sandbox.uses == 1
        assert b"NEW=2" in (await shell(sandbox.connection, "env")).stdout
        # Reset once more, now that the template stays.
        r.faulty.faults = ()
        r.pool.release(sandbox.id)
        await ready(r)
        assert (await r.pool.acquire()).uses == 2
        assert r.pool.stats().reused_total == 1


def test_a_pool_of_containers_that_would_be_reset_is_refused(tmp_path: Path) -> None:
    settings = {"pools": {"a": {"backend": "docker", "image": "x", "max_uses": 3}}, "state_dir": tmp_path}
    with pytest.raises(ConfigError, match=r"pools\.a\.max_uses = 3: a container cannot be proven"):
        load(None, **settings)


# -- for real

DIRT = r"""
set -e
echo x > /workspace/file; echo x > /tmp/file; echo x > /var/tmp/file; echo x > /dev/shm/file
printf '#!/bin/sh\n' > /tmp/setuid; chmod 6755 /tmp/setuid; chmod 0700 /workspace
mkfifo /tmp/fifo; mkdir -p /workspace/a/b; chmod 000 /workspace/a; ln -s /etc/passwd /tmp/link
ln /tmp/file /tmp/hard
(exec 9> /tmp/deleted; rm /tmp/deleted; setsid sleep 1000 <&- >&- 2>&- 9>&9 &)
setsid sh -c 'trap "" TERM HUP; (sleep 1000 &) ; while :; do sleep 10; done' <&- >&- 2>&- &
"""
DIRT_PYTHON = r"""
import ctypes, mmap, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
assert libc.shmget(1234, 4096, 0o1666) >= 0 or ctypes.get_errno() == 38
assert libc.semget(1234, 2, 0o1666) >= 0
assert libc.msgget(1234, 0o1666) >= 0
librt = ctypes.CDLL("librt.so.1", use_errno=True)
assert librt.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o666, None) >= 0
box = socket.socket(socket.AF_UNIX); box.bind("/tmp/socket"); box.listen()
if os.fork() == 0:
    abstract = socket.socket(socket.AF_UNIX); abstract.bind("\0abstract"); abstract.listen()
    os.setsid()
    for fd in (0, 1, 2): os.close(fd)
    import time; time.sleep(1000)
for act in (lambda: os.setpriority(os.PRIO_PROCESS, 1, 15), lambda: os.sched_setaffinity(1, {0}),
            lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (100, 100))):
    try: act()
    except OSError as error: print(error)
print("dirty")
"""


async def dirty(box: Connection) -> None:
    """All that a command can think of."""
    assert (await shell(box, DIRT)).code == 0
    outcome = await execute(box, Command((b"python3", b"-c", DIRT_PYTHON.encode())))
    assert outcome.stdout.endswith(b"dirty\n"), outcome
    # As long as its starter is asked for, so that the command is named and runs.
    async with box.exec(Command((b"sleep", b"1000"), id="stays", detached=True)) as events:
        await anext(aiter(events))
    assert len(await box.commands.known()) == 1


async def test_a_dirty_sandbox_is_as_new_afterwards(backend: NamespaceBackend) -> None:
    template = Template("t", env={b"A": b"b"})
    first = await backend.create("t-1", template)
    new = await portray(first, template)
    pid = int((await backend.describe("t-1"))["pid"])
    await dirty(first)
    assert len(differences(new, await portray(first, template))) > 6
    async with first.exec(Command((b"sleep", b"1000"))) as running:
        second = await backend.reset("t-1", "t-2", template)
        with pytest.raises(SandboxLost):
            _ = [event async for event in running]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert differences(new, await portray(second, template)) == []
    assert await second.commands.known() == []
    outcome = await shell(second, "cat /proc/sysvipc/*; find / -xdev -name file -user sandbox; true")
    assert (outcome.code, b"1234" in outcome.stdout) == (0, False)
    program = "import ctypes, os; print(ctypes.CDLL('librt.so.1').mq_open(b'/queue', os.O_RDWR))"
    outcome = await execute(second, Command((b"python3", b"-c", program.encode())))
    assert outcome.stdout == b"-1\n"
    assert await backend.list_ids() == ["t-2"]
    assert await backend.describe("t-1") == {}
    for name, connection in (("t-1", first), ("t-2", second)):
        await connection.close()
        await backend.destroy(name)


async def test_a_pool_resets_what_its_holders_dirtied(backend: NamespaceBackend) -> None:
    options = PoolOptions(Bounds(1, 1, 4, 10), care=Care(max_uses=3))
    pool = Pool("p", backend=backend, template=Template("p"), options=options)
    async with pool.run(), asyncio.timeout(60):
        for use in (1, 2, 3, 1):
            sandbox = await pool.acquire()
            assert sandbox.uses == use
            assert sandbox.connection is not None
            assert (await shell(sandbox.connection, "ls -A /tmp /workspace /dev/shm")).stdout.split() == [
                b"/dev/shm:", b"/tmp:", b"/workspace:",
            ]  # fmt: skip
            await dirty(sandbox.connection)
            pool.release(sandbox.id)
            with pytest.raises(SandboxdError):
                pool.get(sandbox.id)
        assert pool.failures() == []
        assert pool.stats().reused_total == 2
