"""Commands that are talked to, and interpreters that stay, through a real daemon and namespace sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from sandboxd import Box, Interaction
from sandboxd.errors import InvalidRequest, SandboxNotFound
from sandboxd.sessions import Session, SessionResult
from sandboxd.types import Event, Exited, Started, Stdout
from sandboxd.v1 import sandbox_service_pb2 as pb

from .conftest import daemon_process

pytestmark = pytest.mark.anyio
POOLS = {"python": {"backend": "namespace", "warm": 1}}


@pytest.fixture
async def box(daemon: Callable[..., Any]) -> AsyncIterator[Box]:
    async with daemon(pools=POOLS) as client, client.acquire("python", timeout=30) as leased:
        yield leased


async def output(events: AsyncIterator[Event]) -> tuple[bytes, Exited]:
    """What is left on standard output, and the exit."""
    data = b""
    async for event in events:
        if isinstance(event, Stdout):
            data += event.data
        if isinstance(event, Exited):
            return data, event
    raise AssertionError("no exit")


async def children(box: Box) -> bytes:
    """What runs in the sandbox beside PID 1 and the command that asks."""
    script = 'for p in /proc/[0-9]*; do p=${p#/proc/}; [ "$p" = 1 ] || [ "$p" = $$ ] || echo "$p"; done'
    return (await box.exec(["sh", "-c", script])).stdout


async def all_end(box: Box) -> None:
    async with asyncio.timeout(20):
        while await children(box):
            await asyncio.sleep(0.01)


async def line(running: Interaction) -> bytes:
    """Standard output up to the end of a line."""
    data = b""
    while not data.endswith(b"\n"):
        event = await anext(running)
        assert isinstance(event, Stdout)
        data += event.data
    return data


async def test_a_calculator_answers_line_by_line(box: Box) -> None:
    async with box.interact(["python3", "-uc", "while True: print(eval(input()))"]) as running:
        assert isinstance(await anext(running), Started)
        for question, answer in ((b"6*7\n", b"42\n"), (b"2**10\n", b"1024\n")):
            await running.write(question)
            assert await line(running) == answer
        await running.end_input()
        _, end = await output(running)
        assert end.exit_code == 1
        await running.write(b"too late")
        with pytest.raises(StopAsyncIteration):
            await anext(running)


async def test_a_wait_for_an_event_may_be_given_up(box: Box) -> None:
    async with box.interact(["cat"]) as running:
        assert isinstance(await anext(running), Started)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(running)
        await running.write(b"still here\n")
        assert await line(running) == b"still here\n"


async def test_leaving_the_block_ends_the_command(box: Box) -> None:
    async with box.interact(["sleep", "1000"], terminal=(24, 80)) as running:
        assert isinstance(await anext(running), Started)
    await all_end(box)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "must carry `start`"),
        ([pb.InteractCommandRequest(stdin=b"x")], "must carry `start`"),
        (["start", "start"], "only the first message"),
        (["start", pb.InteractCommandRequest(signal=65)], "signal 65"),
        (["start", pb.InteractCommandRequest(signal=-1)], "signal -1"),
        (["start", pb.InteractCommandRequest(resize=pb.TerminalSize(rows=0, columns=5))], "0 rows"),
        (["start", pb.InteractCommandRequest(stdin=bytes((1 << 20) + 1))], "more than"),
        ([pb.InteractCommandRequest(start=pb.ExecCommandRequest(argv=[b"x"], stdin=b"y"))], "start.stdin"),
    ],
)
async def test_what_may_not_be_said_is_named(box: Box, messages: list[Any], said: str) -> None:
    """And it ends the command that it was said to."""
    start = pb.InteractCommandRequest(start=pb.ExecCommandRequest(name=box.name, argv=[b"sleep", b"100"]))
    call = box._client.sandboxes.InteractCommand()
    for message in messages:
        request = start if message == "start" else message
        if request.HasField("start"):
            request.start.name = box.name
        await call.write(request)
    if not messages:
        await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as raised:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert said in str(raised.value.details())
    await all_end(box)


async def test_a_sandbox_that_is_not_there(daemon: Callable[..., Any]) -> None:
    async with daemon(pools=POOLS) as client:
        async with client.acquire("python", timeout=30) as box:
            pass
        with pytest.raises(SandboxNotFound):
            async with box.interact(["cat"]) as running:
                await anext(running)


# -- a shell that stays


async def test_a_shells_state_outlives_a_call(box: Box) -> None:
    async with box.shell() as shell:
        assert (await shell.run("cd /tmp; count=3; twice() { echo $(($1 * 2)); }")).ok
        result = await shell.run('pwd; twice "$count"; echo err >&2; false')
        assert (result.stdout, result.stderr, result.exit_code) == (b"/tmp\n6\n", b"err\n", 1)
        assert (result.timed_out, result.alive) == (False, True)
        result = await shell.run("printf 'no newline'; exec 5>&1")
        assert (result.stdout, result.exit_code) == (b"no newline", 0)


async def test_whatever_the_code_is_the_shell_goes_on(box: Box) -> None:
    async with box.shell() as shell:
        for broken in ("echo 'open", "if true; then", ") (", "cat <<EOF\nunfinished", "exit_code=$(", "}"):
            await shell.run(broken)
        assert (await shell.run("cat; echo ${#BASH_VERSION} | wc -l")).stdout == b"1\n"
        assert (await shell.run("echo one; exec >/tmp/log 2>&1; echo two")).stdout == b"one\n"
        assert (await shell.run("exec >/dev/null; cat /tmp/log >&198")).stdout == b"two\n"
        assert (await shell.run("set -u; nothing=$unset_name; echo never")).exit_code != 0


async def test_a_shells_call_that_runs_too_long_is_interrupted(box: Box) -> None:
    async with box.shell() as shell:
        await shell.run("kept=yes")
        for endless in (
            "sleep 1000",
            "while :; do :; done",
            "sleep 1000 | cat",
            "(sleep 1000)",
            "f() { while :; do :; done; }; while :; do f; done",
        ):
            result = await interrupted(shell, f"echo before; {endless}; echo never")
            assert (result.timed_out, result.exit_code) == (True, None), endless
            assert result.stdout == b"before\n", endless
            assert result.alive, endless
        assert (await shell.run("echo $kept")).stdout == b"yes\n"
        stubborn = "python3 -c 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(1000)'"
        result = await shell.run(stubborn, timeout=0.3)
        assert (result.timed_out, result.alive) == (True, True)
        assert (await shell.run("echo $kept")).stdout == b"yes\n"
        # A builtin that never looks up: the shell is ended, and says so.
        result = await shell.run("read x </dev/zero", timeout=0.3)
        assert (result.timed_out, result.alive) == (True, False)
        assert not await children(box)


async def interrupted(session: Session, code: str) -> SessionResult:
    """How code ends that runs too long and prints as it begins: it is given time to begin."""
    for seconds in (0.3, 2.0, 10.0):
        result = await session.run(code, timeout=seconds)
        if result.stdout:
            break
    return result


async def test_a_shell_that_ends_says_so(box: Box) -> None:
    async with box.shell() as shell:
        result = await shell.run("echo bye; exit 3")
        assert (result.stdout, result.exit_code, result.alive) == (b"bye\n", 3, False)
        with pytest.raises(InvalidRequest, match="has ended"):
            await shell.run("echo again")


async def test_large_output_of_a_shell_is_whole(box: Box) -> None:
    async with box.shell() as shell:
        result = await shell.run("head -c 3000000 /dev/zero; head -c 1000000 /dev/zero >&2")
        assert (len(result.stdout), len(result.stderr)) == (3_000_000, 1_000_000)
        assert (result.stdout_cut, result.stderr_cut) == (None, None)


async def test_of_very_large_output_a_shell_keeps_the_ends(box: Box) -> None:
    async with box.shell() as shell:
        result = await shell.run("echo first; head -c 9000000 /dev/zero; echo last; echo err >&2")
        assert result.stdout.startswith(b"first\n")
        assert result.stdout.endswith(b"\0last\n")
        assert result.stdout_cut is not None
        assert len(result.stdout) + result.stdout_cut.dropped == 9_000_011
        assert (result.stderr, result.stderr_cut) == (b"err\n", None)
        endless = await shell.run("yes", timeout=1)
        assert (endless.timed_out, endless.alive) == (True, True)
        assert len(endless.stdout) <= 4 << 20
        assert (await shell.run("echo on")).stdout == b"on\n"


async def test_calls_at_once_take_turns(box: Box) -> None:
    async with box.shell() as shell:
        results = await asyncio.gather(*(shell.run(f"n=$((n + 1)); echo {i} $n") for i in range(20)))
        assert [result.stdout for result in results] == [b"%d %d\n" % (i, i + 1) for i in range(20)]


async def test_a_cancelled_call_is_interrupted_by_the_next(box: Box) -> None:
    async with box.shell() as shell:
        await shell.run("kept=yes")
        call = asyncio.create_task(shell.run("echo started >/tmp/started; sleep 1000"))
        async with asyncio.timeout(20):
            while (await box.exec(["test", "-e", "/tmp/started"])).exit_code:
                await asyncio.sleep(0.01)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        assert (await shell.run("echo $kept", timeout=20)).stdout == b"yes\n"


# -- a Python that stays


async def test_a_pythons_state_outlives_a_call(box: Box) -> None:
    async with box.python() as python:
        assert (await python.run("import math\ndef area(r):\n    return round(math.pi * r * r, 2)")).ok
        result = await python.run("x = area(2)\nx")
        assert (result.stdout, result.exit_code) == (b"12.57\n", 0)
        assert (await python.run("print(x); None")).stdout == b"12.57\n"
        assert (
            await python.run("class A: pass\nimport pickle; len(pickle.dumps(A())) > 0")
        ).stdout == b"True\n"


async def test_pythons_errors_are_told_with_their_lines(box: Box) -> None:
    async with box.python() as python:
        result = await python.run("def f():\n    return 1 / 0\n\nf()")
        assert result.exit_code == 1
        assert b"ZeroDivisionError: division by zero" in result.stderr
        assert b"return 1 / 0" in result.stderr
        assert b"python_session" not in result.stderr
        assert b'"<string>"' not in result.stderr
        assert b"SyntaxError" in (await python.run("print(")).stderr
        assert (await python.run("raise SystemExit(4)")).exit_code == 4
        assert (await python.run("input()")).stderr.rstrip().endswith(b"EOFError: EOF when reading a line")
        assert (await python.run("import sys; sys.stdout.close()")).alive
        assert (await python.run("sys.stdout = sys.__stderr__; 1 + 1")).stderr == b"2\n"


async def test_pythons_call_that_runs_too_long_is_interrupted(box: Box) -> None:
    async with box.python() as python:
        await python.run("kept = 'yes'")
        for endless in (
            "while True: pass",
            "import time; time.sleep(1000)",
            "import subprocess; subprocess.run(['sleep', '1000'])",
        ):
            result = await interrupted(python, f"print('before')\n{endless}")
            assert (result.timed_out, result.stdout, result.alive) == (True, b"before\n", True), endless
            assert b"KeyboardInterrupt" in result.stderr
        assert (await python.run("kept")).stdout == b"'yes'\n"
        defiant = "while True:\n    try: time.sleep(1)\n    except BaseException: pass"
        result = await python.run(defiant, timeout=0.3)
        assert (result.timed_out, result.alive) == (True, False)
        assert not await children(box)


async def test_a_sandbox_without_the_interpreter(box: Box) -> None:
    with pytest.raises(InvalidRequest, match="no shell can be opened"):
        async with box.shell(env={"PATH": "/nowhere"}):
            pass


# -- the command line


@pytest.fixture
def address_of_namespace_daemon(tmp_path: Path) -> Iterator[str]:
    with daemon_process(tmp_path, '[pools.python]\nbackend = "namespace"\nwarm = 1\n') as address:
        yield address


def test_exec_on_a_terminal(address_of_namespace_daemon: str) -> None:
    """As a person does it: on a terminal of its own, with a shell that says what it sees."""
    main, side = pty.openpty()
    command = [sys.executable, "-m", "sandboxd", "exec", "-t", "--address", address_of_namespace_daemon]
    process = subprocess.Popen(
        [*command, "python", "--", "sh", "-c", "read x; echo got:$x; tty -s && echo tty"],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    os.write(main, b"hello\r")
    seen = b""
    with contextlib.suppress(OSError):
        while data := os.read(main, 4096):
            seen += data
    os.close(main)
    assert process.wait(60) == 0
    assert b"got:hello\r\ntty\r\n" in seen


def test_exec_passes_input_on_as_it_comes(address_of_namespace_daemon: str) -> None:
    command = [sys.executable, "-m", "sandboxd", "exec", "-i", "--address", address_of_namespace_daemon]
    with subprocess.Popen(
        [*command, "python", "--", "sh", "-c", 'while read -r x; do echo "<$x>"; done'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        for word in (b"one", b"two"):
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"<" + word + b">\n"
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait(30) == 0
