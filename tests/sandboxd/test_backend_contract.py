"""What every backend owes the pool, checked on each: fake, namespace, docker, and docker without a guest."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import time
import uuid

import pytest

from sandboxd.backends.base import Connection
from sandboxd.errors import FileNotFound, SandboxLost
from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout

from .backend_kit import Case, execute, pieces, processes_with, read, shell

pytestmark = pytest.mark.anyio
# More than any grace, less than what is to be ended would last.
SOON = 20.0


async def test_output_is_the_bytes_that_were_written(box: Connection) -> None:
    script = r"printf 'a\n\n\000\377\376 no newline'; printf 'other' >&2; exit 7"
    outcome = await shell(box, script)
    assert outcome.stdout == b"a\n\n\0\xff\xfe no newline"
    assert outcome.stderr == b"other"
    assert outcome.code == 7
    assert outcome.exited.wall > 0


async def test_a_command_that_kills_itself_was_signaled(case: Case, box: Connection) -> None:
    outcome = await shell(box, "kill -TERM $$")
    if case.by_engine:
        assert outcome.code == 128 + 15
        return
    assert (outcome.exited.reason, outcome.exited.signal) == (ExitReason.SIGNALED, 15)


async def test_standard_input_ends(box: Connection) -> None:
    assert (await execute(box, Command(argv=(b"cat",)))).stdout == b""
    data = bytes(range(256)) * 2000
    outcome = await execute(box, Command(argv=(b"cat",), stdin=data))
    assert outcome.stdout == data
    # Nobody reads it: that is no error, and nothing waits for it.
    assert (await execute(box, Command(argv=(b"true",), stdin=data))).code == 0


async def test_environment_and_directory(case: Case, box: Connection) -> None:
    assert "PYTEST_CURRENT_TEST" in os.environ
    value = "1ü".encode() if case.by_engine else b"1\xff"
    lines = (await execute(box, Command(argv=(b"env",), env={b"MINE": value}))).stdout.split(b"\n")
    assert b"MINE=" + value in lines
    assert not any(line.startswith(b"PYTEST") for line in lines)
    # A relative directory starts at the template's.
    assert (await shell(box, "mkdir -p sub/dir && echo x > sub/dir/file")).code == 0
    assert (await execute(box, Command(argv=(b"cat", b"file"), cwd=b"sub/dir"))).stdout == b"x\n"


async def test_what_cannot_be_started_is_said(case: Case, box: Connection) -> None:
    missing = (await execute(box, Command(argv=(b"no-such-program",)))).exited
    assert (missing.reason, missing.exit_code) == (ExitReason.NOT_STARTED, 127)
    assert "no-such-program" in missing.detail
    await box.files.write(b"plain", pieces(b"text"), 0o644)
    refused = (await execute(box, Command(argv=(b"./plain",)))).exited
    # The Engine says 126 also of a program that ended so itself.
    reason = ExitReason.EXITED if case.by_engine else ExitReason.NOT_STARTED
    assert (refused.reason, refused.exit_code) == (reason, 126)


async def test_a_timeout_kills_the_whole_tree(box: Connection) -> None:
    marker = f"9{uuid.uuid4().int % 10**12:012d}"
    script = (
        f"echo begun; sleep {marker} & setsid sleep {marker} & (setsid sh -c 'sleep {marker} & ' &) ; wait"
    )
    begin = time.monotonic()
    outcome = await shell(box, script, timeout=0.7)
    assert 0.7 <= time.monotonic() - begin < 0.7 + SOON
    assert outcome.exited.reason is ExitReason.TIMED_OUT
    assert outcome.stdout == b"begun\n"
    assert await processes_with(box, marker) == []
    assert (await shell(box, "echo usable")).stdout == b"usable\n"


async def test_leaving_a_command_kills_its_tree(box: Connection) -> None:
    marker = f"8{uuid.uuid4().int % 10**12:012d}"
    script = f"setsid sleep {marker} & echo begun; wait"
    async with box.exec(Command(argv=(b"sh", b"-c", script.encode()))) as events:
        async for event in events:
            if isinstance(event, Stdout):
                # Or there would be nothing to kill.
                assert await processes_with(box, marker)
                break
        else:
            pytest.fail("it ended before it was left")
    async with asyncio.timeout(SOON):
        while await processes_with(box, marker):
            continue  # Each look is a command of its own: the sandbox sets the pace.


async def test_output_over_the_limit_ends_the_command(box: Connection) -> None:
    outcome = await execute(box, Command(argv=(b"yes",), output_limit=100_000))
    assert outcome.exited.reason is ExitReason.OUTPUT_LIMIT_EXCEEDED
    assert outcome.stdout == (b"y\n" * 50_000)
    exact = await shell(box, "head -c 1000 /dev/zero", output_limit=1000)
    assert (exact.code, len(exact.stdout)) == (0, 1000)


async def test_output_over_the_limit_keeps_its_head_and_its_tail(box: Connection) -> None:
    script = b"yes 0123456789 | head -n 30000; echo whole >&2; echo the end"
    whole = b"0123456789\n" * 30000 + b"the end\n"
    command = Command((b"sh", b"-c", script), output_limit=1000, output_tail=500)
    pieces: dict[type[Event], list[tuple[int, bytes]]] = {Stdout: [], Stderr: []}
    async with box.exec(command) as running:
        async for event in running:
            if isinstance(event, Stdout | Stderr):
                pieces[type(event)].append((event.offset, event.data))
    assert isinstance(event, Exited)
    assert (event.reason, event.exit_code) == (ExitReason.EXITED, 0)
    for kind, expected in ((Stdout, whole), (Stderr, b"whole\n")):
        assert all(data == expected[offset : offset + len(data)] for offset, data in pieces[kind])
        assert max(offset + len(data) for offset, data in pieces[kind]) == len(expected)
        holes = [b - (a + len(data)) for (a, data), (b, _) in itertools.pairwise(pieces[kind])]
        assert [hole for hole in holes if hole] == ([len(whole) - 1000 - 500] if kind is Stdout else [])


async def test_large_output_is_whole(box: Connection) -> None:
    data = os.urandom(1 << 20)
    await box.files.write(b"noise", pieces(data), 0o644)
    outcome = await shell(box, "for i in 1 2 3 4 5 6 7 8; do cat noise; done")
    assert outcome.code == 0
    assert hashlib.sha256(outcome.stdout).digest() == hashlib.sha256(data * 8).digest()


async def test_a_reader_that_stalls_delays_only_its_own_command(box: Connection) -> None:
    async with box.exec(Command(argv=(b"yes",))) as events:
        assert isinstance(await anext(aiter(events)), Started)
        async with asyncio.timeout(30):
            for n in range(5):
                assert (await shell(box, f"echo {n}")).stdout == f"{n}\n".encode()


async def test_a_background_child_does_not_hold_up_the_end(box: Connection) -> None:
    begin = time.monotonic()
    outcome = await shell(box, "sleep 30 & echo done")
    assert outcome.stdout == b"done\n"
    assert outcome.code == 0
    assert time.monotonic() - begin < SOON


async def test_the_end_comes_after_the_last_byte(box: Connection) -> None:
    for n in range(30):
        outcome = await shell(box, f"printf 'out {n}'; printf 'err {n}' >&2")
        assert (outcome.stdout, outcome.stderr) == (f"out {n}".encode(), f"err {n}".encode())


async def test_many_commands_at_once(box: Connection) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(shell(box, f"sleep 0.1; echo {n}")) for n in range(20)]
    assert [task.result().stdout for task in running] == [f"{n}\n".encode() for n in range(20)]


async def test_a_command_that_would_outlive_the_daemon_runs_everywhere(box: Connection) -> None:
    for name in ("r1", "r2"):
        command = Command((b"echo", b"once"), id=name, resumable=True, output_limit=1000)
        assert (await execute(box, command)).stdout == b"once\n"


async def test_sandboxes_do_not_share_files(case: Case) -> None:
    async with case.sandbox() as one, case.sandbox() as other:
        await one.files.write(b"mine", pieces(b"1"), 0o644)
        with pytest.raises(FileNotFound):
            await read(other, b"mine")


async def test_names_and_the_end(case: Case) -> None:
    await case.backend.prepare(case.template)
    connection = await case.backend.create("one", case.template)
    await connection.ping()
    assert await case.backend.list_ids() == ["one"]
    lost = asyncio.create_task(connection.wait_lost())
    await case.backend.destroy("one")
    assert await case.backend.list_ids() == []
    assert await asyncio.wait_for(lost, 30)
    with pytest.raises(SandboxLost):
        await shell(connection, "true")
    with pytest.raises(SandboxLost):
        await connection.ping()
    await case.backend.destroy("one")
    await case.backend.destroy("never-made")


async def test_a_cancelled_start_leaves_nothing(case: Case) -> None:
    starts = [asyncio.create_task(case.backend.create(f"c{n}", case.template)) for n in range(4)]
    await asyncio.sleep(0)
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)
    for n in range(4):
        await case.backend.destroy(f"c{n}")
    assert await case.backend.list_ids() == []


async def test_capabilities_are_told(case: Case) -> None:
    capabilities = case.backend.capabilities()
    assert capabilities.isolation
    assert capabilities.enforced_limits <= {"memory", "cpu", "pids", "open_files", "disk"}
