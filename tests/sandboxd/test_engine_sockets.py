"""An Engine that fails leaves no descriptor of the daemon's open, nor one to a garbage collection to come."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from sandboxd.backends.engine import Engine
from sandboxd.errors import BackendUnavailable

from .test_cancelled_backends import descriptors

pytestmark = pytest.mark.anyio


class FailingEngine:
    """Answers what an Engine is asked when it is opened, until it is told to fail: to end the connection, or
    with a status.
    """

    def __init__(self) -> None:
        self.fails: dict[str, int | None] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                what = head.split()[1].decode().partition("?")[0].rpartition("/")[2]
                status = self.fails.get(what, 200)
                if status is None:
                    return
                body = json.dumps({"ApiVersion": "1.44"} if status == 200 else {"message": "no"}).encode()
                fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"HTTP/1.1 {status} It\r\n{fields}\r\n".encode() + body)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            await writer.wait_closed()


async def closed(before: Counter[str]) -> None:
    """Returns when no more is open than before, without a collection; the server hears of ends later."""
    while descriptors() - before:
        await asyncio.sleep(0)


async def failing(engine: Engine) -> None:
    with pytest.raises(BackendUnavailable):
        await engine.call(lambda api: api.containers())


async def test_calls_of_an_engine_that_is_away_leave_nothing_open(tmp_path: Path) -> None:
    path, served = tmp_path / "docker.sock", FailingEngine()
    server = await asyncio.start_unix_server(served.serve, path)
    engine = Engine(f"unix://{path}")
    async with asyncio.timeout(20):
        unopened = descriptors()
        await engine.open()
        served.fails["json"] = None
        await failing(engine)
        server.close()
        await server.wait_closed()
        path.unlink()
        await failing(engine)
        before = descriptors()
        for _ in range(3):
            await failing(engine)
        await closed(before)
        engine.close()
        await closed(unopened)


@pytest.mark.parametrize("what", ["version", "info"])
@pytest.mark.parametrize("status", [None, 500])
async def test_an_engine_that_cannot_be_opened_leaves_nothing_open(
    what: str, status: int | None, tmp_path: Path
) -> None:
    path, served = tmp_path / "docker.sock", FailingEngine()
    served.fails[what] = status
    async with asyncio.timeout(20), await asyncio.start_unix_server(served.serve, path):
        before = descriptors()
        engine = Engine(f"unix://{path}")
        with pytest.raises(BackendUnavailable):
            await engine.open()
        await closed(before)
        engine.close()
