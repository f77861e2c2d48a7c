"""Joins a command in a sandbox to the streams, or the terminal, of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Sequence

from sandboxd.client import Box
from sandboxd.config import ConfigError
from sandboxd.interaction import Interaction
from sandboxd.requests import CommandOptions
from sandboxd.types import Event, Exited, Stderr, Stdout
from sandboxd.wire import STDIN_LIMIT_BYTES

PIECE_BYTES = 64 << 10
STDIN = 0


async def run(
    box: Box, argv: Sequence[str], *, on_terminal: bool, interactive: bool, options: CommandOptions
) -> Exited:
    """Runs the command to its end, its output written to this process's.

    With `on_terminal` it runs on a terminal of this one's size, which passes every key on; with `interactive`
    its input is what comes on standard input; else it is all of standard input, unless that is a terminal.
    Raises ConfigError where that is more than a command can be given at once.
    """
    if on_terminal:
        with _raw():
            return await _talk(box, argv, options, size=_size())
    if interactive:
        return await _talk(box, argv, options, size=None)
    return await _show(box.stream(argv, stdin=await given_input(), **options))


async def _talk(
    box: Box, argv: Sequence[str], options: CommandOptions, *, size: tuple[int, int] | None
) -> Exited:
    with_size: CommandOptions = {**options, "terminal": size}
    async with box.interact(argv, **with_size) as running:
        feeding = asyncio.create_task(_feed(running))
        try:
            with _resizes(running) if size else contextlib.nullcontext():
                return await _show(running)
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])


async def _show(events: AsyncIterator[Event]) -> Exited:
    async for event in events:
        match event:
            case Stdout(data):
                _write(sys.stdout.fileno(), data)
            case Stderr(data):
                _write(sys.stderr.fileno(), data)
            case Exited():
                return event
    raise AssertionError("a command's stream ends with its exit")


async def _feed(running: Interaction) -> None:
    """Passes standard input on, without keeping this process from anything else meanwhile."""
    while True:
        await _readable()
        data = os.read(STDIN, PIECE_BYTES)
        if not data:
            await running.end_input()
            return
        await running.write(data)


async def given_input() -> bytes:
    """Standard input to its end, unless it is a terminal. Meanwhile the lease is renewed, Ctrl-C is heard.

    Raises ConfigError where it is more than a command can be given at once.
    """
    data = bytearray()
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    while True:
        await _readable()
        piece = os.read(STDIN, PIECE_BYTES)
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > STDIN_LIMIT_BYTES:
            raise ConfigError(
                f"exec: standard input is longer than {STDIN_LIMIT_BYTES} bytes; add --interactive"
            )


async def _readable() -> None:
    """Returns when standard input has something, or has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(STDIN, ready.set)
    except PermissionError:
        return  # A file, which can always be read.
    try:
        await ready.wait()
    finally:
        loop.remove_reader(STDIN)


def _size() -> tuple[int, int]:
    size = os.get_terminal_size(STDIN)
    return max(1, size.lines), max(1, size.columns)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """The terminal passes every key on, and is as it was afterwards."""
    before = termios.tcgetattr(STDIN)
    # Not flushed: what was typed ahead is the command's.
    tty.setraw(STDIN, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizes(running: Interaction) -> Iterator[None]:
    """Within the block the command's terminal takes the size of this one whenever that changes."""
    loop = asyncio.get_running_loop()
    telling: set[asyncio.Task[None]] = set()

    def tell() -> None:
        task = asyncio.create_task(running.resize(*_size()))
        telling.add(task)
        task.add_done_callback(telling.discard)

    loop.add_signal_handler(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


def _write(descriptor: int, data: bytes) -> None:
    """Writes bytes as they are, past Python's text layer."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
