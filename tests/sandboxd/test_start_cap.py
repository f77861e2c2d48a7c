"""Starts at once are bounded for all clients of a daemon together, whatever processes they are in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]

LIMIT, CLIENTS, EACH = 3, 2, 10

SETUP = """
echo >{room}/$$
here=0
for each in {room}/*; do kill -0 ${{each##*/}} 2>/dev/null && here=$((here + 1)); done
echo $here >>{counts}
sleep 0.02
rm {room}/$$
"""
"""The setup of a sandbox is a part of its start: each notes how many processes are in the midst of it."""

CLIENT = f"""
import asyncio, sys
from sandboxd import Client

async def main():
    async with Client(sys.argv[1]) as client, client.acquire_gang("p", {EACH}, timeout=60):
        pass

asyncio.run(main())
"""


async def test_starts_at_once_are_bounded_across_processes(daemon: OpenDaemon, tmp_path: Path) -> None:
    room, counts = tmp_path / "room", tmp_path / "counts"
    room.mkdir()
    setup = ["sh", "-c", SETUP.format(room=room, counts=counts)]
    pools = {"p": {"backend": "fake", "setup": setup, "start_limit": LIMIT, "start_limit_min": LIMIT}}
    async with asyncio.timeout(50), daemon(pools=pools) as client:
        programs = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, client.address)
            for _ in range(CLIENTS)
        ]
        assert [await program.wait() for program in programs] == [0] * CLIENTS
        stats = await client.get_pool("p")
    found = [int(line) for line in counts.read_text().split()]
    assert len(found) >= CLIENTS * EACH
    assert max(found) <= LIMIT
    assert stats.acquired_total == stats.released_total == CLIENTS * EACH
