"""A daemon that is too busy to greet a client at once is there all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandboxd.child import child_daemon
from sandboxd.client import Client

GREETED_AFTER_SECONDS = 0.3


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


def test_a_late_greeting_is_waited_for(tmp_path: Path) -> None:
    asyncio.run(_greet_late(tmp_path))


async def _greet_late(tmp_path: Path) -> None:
    config = tmp_path / "fake.toml"
    config.write_text('[pools.python]\nbackend = "fake"\nwarm = 1\n')
    accepted: list[str] = []

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append("once more")
        greeted = asyncio.Event()
        asyncio.get_running_loop().call_later(GREETED_AFTER_SECONDS, greeted.set)
        await greeted.wait()
        back, forth = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        async with asyncio.TaskGroup() as pipes:
            pipes.create_task(_pipe(reader, forth))
            pipes.create_task(_pipe(back, writer))

    async with child_daemon(tmp_path / "state", config=config) as address:
        async with await asyncio.start_unix_server(late, tmp_path / "late.sock"), asyncio.timeout(30):
            async with Client(f"unix:{tmp_path / 'late.sock'}") as client:
                assert (await client.get_pool("python")).warm_target == 1
    assert accepted == ["once more"]
