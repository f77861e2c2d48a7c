"""A connection that breaks under a bounded command while the daemon lives: it runs once, blaming nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import Box, Client, errors
from sandboxd.types import Started
from sandboxd.v1 import sandbox_service_pb2 as pb

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]


class Proxy:
    """Passes a unix socket on, until its connections are broken."""

    def __init__(self, path: Path, target: str) -> None:
        self.path, self._target = path, target
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        async with server:
            yield f"unix:{self.path}"
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(self._target)
        self._writers |= {writer, ours}
        await asyncio.gather(_pass(reader, ours), _pass(theirs, writer))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.mark.parametrize("backend", ["fake", "namespace"])
async def test_a_command_under_a_broken_connection_runs_once(
    daemon: OpenDaemon, tmp_path: Path, backend: str
) -> None:
    pools = {"python": {"backend": backend, "warm": 1}}
    async with daemon(pools=pools) as direct:
        proxy = Proxy(tmp_path / "proxy.sock", direct.address.removeprefix("unix:"))
        async with proxy.running() as address, Client(address) as client:
            box = await client.acquire("python", timeout=60)
            script = "echo run >>runs; echo $$ >pid; exec sleep 1000"
            running = asyncio.ensure_future(box.exec(["sh", "-c", script], output_limit=1000))
            async with asyncio.timeout(20):
                while not (await box.exec(["test", "-s", "pid"])).ok:
                    await asyncio.sleep(0.02)
            proxy.cut()
            with pytest.raises(errors.BackendUnavailable) as raised:
                await asyncio.wait_for(running, 30)
            assert raised.value.mask
            assert await box.read_file("runs") == b"run\n"
            assert await box.list_commands() == []
            assert (await box.exec(["echo", "on"], output_limit=1000)).stdout == b"on\n"


async def test_a_connection_that_breaks_while_input_is_sent_is_told_as_that(
    daemon: OpenDaemon, tmp_path: Path
) -> None:
    async with daemon() as direct:
        proxy = Proxy(tmp_path / "proxy.sock", direct.address.removeprefix("unix:"))
        async with proxy.running() as address, Client(address, patience=0.0) as client:
            # gRPC notices it either in what it sends or in what it reads.
            for _ in range(8):
                box = await direct.acquire("python", timeout=30)
                async with Box(client, pb.Sandbox(name=box.name)).interact(["sleep", "1000"]) as running:
                    assert isinstance(await anext(running), Started)
                    writing = asyncio.ensure_future(running.write(bytes(4 << 20)))
                    await asyncio.sleep(0)
                    proxy.cut()
                    with pytest.raises(errors.BackendUnavailable):
                        await anext(running)
                    await writing
                await box.release()


async def test_what_nobody_named_pushes_out_nothing_that_somebody_did(daemon: OpenDaemon) -> None:
    async with (
        daemon(pools={"python": {"backend": "namespace", "warm": 1}}) as client,
        client.acquire("python", timeout=60) as box,
    ):
        command = await box.start(["echo", "kept"], command_id="mine")
        for _ in range(70):
            assert (await box.exec(["true"], output_limit=1000)).ok
        assert [info.id for info in await box.list_commands()] == ["mine"]
        assert (await command.wait()).stdout == b"kept\n"
