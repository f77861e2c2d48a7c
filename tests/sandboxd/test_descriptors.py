"""No descriptor is closed twice: its number may be another's by then, be it the daemon's own door."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sandboxd.backends.fake import FakeBackend
from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.types import Command, Template

TURNS = 20
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def cut_off(work: Coroutine[Any, Any, object], after: int) -> None:
    """Cancels it after so many turns; the numbers that this sets free are used, and must stay so."""
    task = asyncio.create_task(work)
    await turns(after)
    task.cancel()
    await asyncio.wait((task,))
    taken = [end for _ in range(12) for end in os.pipe()]
    try:
        del task, work
        for _ in range(2):
            gc.collect()
            await turns(3)
        for number in taken:
            os.fstat(number)
    finally:
        for number in taken:
            os.close(number)


def run(loop: Callable[[], asyncio.AbstractEventLoop], body: Coroutine[Any, Any, None]) -> None:
    # What the tests before have left would be looked through each time.
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(body)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_command_that_is_cancelled_at_any_moment(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def body() -> None:
        backend = FakeBackend()
        await backend.open()
        connection = await backend.create("one", Template("t"))

        async def command(interactive: bool) -> None:
            argv = (b"sleep", b"100")
            async with connection.exec(Command(argv, interactive=interactive)) as execution:
                await execution.write(bytes(1 << 20))
                await asyncio.Event().wait()

        for after in range(TURNS):
            for interactive in (False, True):
                await cut_off(command(interactive), after)
        await backend.close()

    run(loop, body())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_to_the_launcher_that_is_cancelled_at_any_moment(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def body() -> None:
        backend = NamespaceBackend(tmp_path / "state")
        await backend.open()
        for after in range(TURNS):
            other = NamespaceBackend(tmp_path / "state")
            await cut_off(other.open(), after)
            await other.let_go()
        await backend.close()

    run(loop, body())
