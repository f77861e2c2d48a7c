"""What is left in the daemon's memory of a sandbox that is gone."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from sandboxd.backends.base import Connection
from sandboxd.types import Command

from .backend_kit import Case, execute, pieces, read, shell

pytestmark = pytest.mark.anyio


async def used(case: Case, freed: asyncio.Event) -> weakref.ref[Connection]:
    """Of a sandbox that did a bit of everything, and is destroyed."""
    async with case.sandbox() as box:
        await box.ping()
        assert (await shell(box, "echo done")).code == 0
        await box.files.write(b"file", pieces(b"text"), 0o644)
        assert await read(box, b"file") == b"text"
        if not case.by_engine:
            await execute(box, Command(argv=(b"true",), id="named"))
            assert [command.id for command in await box.commands.known()] == ["named"]
        return weakref.ref(box, lambda _: freed.set())


async def test_a_connection_needs_no_garbage_collection(case: Case) -> None:
    """A daemon makes full ones at quiet moments alone: a busy one would keep thousands of connections."""
    freed = asyncio.Event()
    gc.disable()
    try:
        connection = await used(case, freed)
        async with asyncio.timeout(20):
            await freed.wait()
        assert connection() is None
    finally:
        gc.enable()
