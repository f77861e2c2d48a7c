"""A sandbox's first process: what those inside try on it, who run as the same user, and what it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.errors import SandboxLost
from sandboxd.types import Command, ExitReason, Template

from .backend_kit import execute, shell

pytestmark = pytest.mark.anyio
TEMPLATE = Template("t")


async def test_no_command_escapes_its_end_by_the_limits_of_pid_1(backend: NamespaceBackend) -> None:
    box = await backend.create("one", TEMPLATE)
    script = (
        b"import resource\nfor limit in range(16):\n    try: resource.prlimit(1, limit, (5, 5))\n"
        b"    except OSError: print('refused')"
    )
    assert (await execute(box, Command(argv=(b"python3", b"-c", script)))).stdout == b"refused\n" * 16
    tree = b"(setsid sleep 77 </dev/null >/dev/null 2>&1 &); sleep 60"
    ended = await execute(box, Command(argv=(b"sh", b"-c", tree), timeout=0.3))
    assert ended.exited.reason is ExitReason.TIMED_OUT
    assert (await shell(box, "grep -lx sleep /proc/[0-9]*/comm")).stdout == b""


async def test_the_first_process_keeps_its_oom_score(tmp_path: Path) -> None:
    own = Path("/proc/self/oom_score_adj")
    before = own.read_text()
    own.write_text("300")  # All that is started from now on has it.
    backend = NamespaceBackend(tmp_path / "state")
    try:
        await backend.open()
        box = await backend.create("one", TEMPLATE)
        own.write_text(before)
        # A child is made with its score, so PID 1 has it, too, until it has made it.
        again = "until read -r first </proc/1/oom_score_adj && [ $first != 500 ]; do :; done"
        for _ in range(2):
            scores = (await shell(box, f"cat /proc/self/oom_score_adj; {again}; echo $first")).stdout
            assert scores == b"500\n300\n"
    finally:
        own.write_text(before)
        await backend.close()


async def test_a_command_begins_beside_others_as_it_does_alone(backend: NamespaceBackend) -> None:
    box = await backend.create("one", TEMPLATE)
    for beside in (b"", b"left behind\n"):
        for argv, why in (((b"no-such",), "not found on PATH"), ((b"/etc",), "Permission denied")):
            exited = (await execute(box, Command(argv=argv))).exited
            assert (exited.reason, why in exited.detail) == (ExitReason.NOT_STARTED, True)
        seen = await shell(
            box, "cat /proc/self/oom_score_adj; grep -qx sleep /proc/[0-9]*/comm && echo left behind"
        )
        assert seen.stdout == b"500\n" + beside
        await shell(box, "sleep 60 </dev/null >/dev/null 2>&1 &")


async def test_nobody_inside_asks_for_the_end(backend: NamespaceBackend) -> None:
    box = await backend.create("one", TEMPLATE)
    script = "import os, signal\nfor n in range(1, 65):\n    os.kill(1, n)"
    assert (await execute(box, Command(argv=(b"python3", b"-c", script.encode())))).stderr == b""
    assert (await shell(box, "kill -TERM 1; echo on")).stdout == b"on\n"
    await box.ping()


async def test_no_signals_hold_up_the_end(backend: NamespaceBackend) -> None:
    """All inside ignore SIGTERM, and send it to their first process as fast as they can."""
    box = await backend.create("one", TEMPLATE)
    storm = "trap '' TERM INT HUP; echo on; while :; do kill -TERM 1; done"
    async with box.exec(Command(argv=(b"sh", b"-c", f"({storm}) & ({storm}) & {storm}".encode()))) as running:
        heard = b""
        async with asyncio.timeout(20):
            while heard.count(b"on\n") < 3:
                heard += getattr(await anext(aiter(running)), "data", b"")
        assert (await shell(box, "echo served")).stdout == b"served\n"
        first = await backend.pid_of("one")
        # Docker would wait for ten seconds here.
        async with asyncio.timeout(8):
            await backend.destroy("one")
        assert not Path(f"/proc/{first}").exists()
        with pytest.raises(SandboxLost):
            async for _ in running:
                pass


async def test_a_storm_of_sigterm_from_outside_is_one_end(backend: NamespaceBackend) -> None:
    box = await backend.create("one", TEMPLATE)
    lost = asyncio.create_task(box.wait_lost())
    first = await backend.pid_of("one")
    async with asyncio.timeout(8):
        while not lost.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGTERM)
            await asyncio.sleep(0)
    await backend.destroy("one")
    assert await backend.list_ids() == []
    assert (await shell(await backend.create("one", TEMPLATE), "echo again")).stdout == b"again\n"
