"""What every backend owes a caller that talks to its commands: input, signals, terminals."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal

import pytest

from sandboxd.backends.base import Connection
from sandboxd.errors import InvalidRequest
from sandboxd.types import Command, ExitReason

from .backend_kit import Case, Talk

pytestmark = pytest.mark.anyio
ON_TERMINAL = b"""
import os, signal, sys

def show(*_):
    size = os.get_terminal_size(0)
    # Not by print, which may be what the signal has interrupted.
    os.write(1, b"%d %d\\n" % (size.lines, size.columns))

signal.signal(signal.SIGWINCH, show)
print(all(os.isatty(fd) for fd in (0, 1, 2)), os.getsid(0) == os.tcgetpgrp(0), flush=True)
show()
for line in sys.stdin:
    print("got", line, end="", flush=True)
"""


async def test_input_is_written_while_the_command_runs(box: Connection) -> None:
    script = b'while read -r line; do echo "got $line"; done; echo end'
    async with box.exec(Command((b"sh", b"-c", script), interactive=True)) as running:
        talk = Talk(running)
        await talk.started()
        for word in (b"one", b"two"):
            await running.write(word + b"\n")
            assert await talk.line() == b"got " + word
        await running.end_input()
        output, end = await talk.end()
    assert (output, end.exit_code) == (b"end\n", 0)


async def test_more_input_than_a_pipe_holds_arrives_whole(box: Connection) -> None:
    data = os.urandom(3 << 20)
    async with box.exec(Command((b"sha256sum",), interactive=True)) as running:

        async def feed() -> None:
            await running.write(data)
            await running.end_input()

        feeding = asyncio.create_task(feed())
        output, _ = await Talk(running).end()
        await feeding
    assert output.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_input_that_nobody_reads_is_dropped(box: Connection) -> None:
    async with box.exec(Command((b"true",), interactive=True)) as running:
        _, end = await Talk(running).end()
        await running.write(bytes(1 << 20))
        await running.end_input()
    assert end.exit_code == 0


async def test_a_signal_reaches_the_commands_group(case: Case, box: Connection) -> None:
    script = b"trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.01; done"
    async with box.exec(Command((b"sh", b"-c", script))) as running:
        talk = Talk(running)
        await talk.started()
        assert await talk.line() == b"ready"
        if case.by_engine:
            with pytest.raises(InvalidRequest):
                await running.signal(signal.SIGUSR1)
            return
        await running.signal(signal.SIGUSR1)
        output, end = await talk.end()
    assert (output, end.exit_code) == (b"caught\n", 5)


async def test_a_command_may_be_ended_by_its_callers_signal(case: Case, box: Connection) -> None:
    if case.by_engine:
        return
    async with box.exec(Command((b"sleep", b"1000"))) as running:
        talk = Talk(running)
        await talk.started()
        await running.signal(signal.SIGTERM)
        _, end = await talk.end()
        await running.signal(signal.SIGTERM)
    assert (end.reason, end.signal) == (ExitReason.SIGNALED, signal.SIGTERM)


async def test_a_terminal_is_one(case: Case, box: Connection) -> None:
    """It has its size, shows what is typed, tells a new size, and Ctrl-C ends what is in its foreground."""
    command = Command((b"python3", b"-c", ON_TERMINAL), terminal=(31, 97), interactive=True)
    if case.without_terminals:
        with pytest.raises(InvalidRequest):
            async with box.exec(command):
                pass
        return
    if case.without_python:
        return  # its terminals are those of the next test
    async with box.exec(command) as running:
        talk = Talk(running)
        await talk.started()
        assert [await talk.line(), await talk.line()] == [b"True True", b"31 97"]
        await running.resize(40, 120)
        assert await talk.line() == b"40 120"
        await running.write(b"word\n")
        assert [await talk.line(), await talk.line()] == [b"word", b"got word"]
        await running.write(b"\x03")
        _, end = await talk.end()
    assert (end.reason, end.signal) == (ExitReason.SIGNALED, signal.SIGINT)


async def test_the_end_of_input_is_typed_into_a_terminal(case: Case, box: Connection) -> None:
    if case.without_terminals:
        return
    command = Command(
        (b"sh", b"-c", b"stty -echo; echo on; cat; echo end"), terminal=(24, 80), interactive=True
    )
    async with box.exec(command) as running:
        talk = Talk(running)
        await talk.started()
        assert await talk.line() == b"on"
        await running.write(b"typed\n")
        assert await talk.line() == b"typed"
        await running.end_input()
        output, end = await talk.end()
    assert (output, end.exit_code) == (b"end\r\n", 0)
