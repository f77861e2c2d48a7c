"""Stands before the host's Docker Engine, and can be stopped, hung and let go on: the Engine never is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxd.backends.engine import Engine

PIECE_BYTES = 1 << 16


class EngineProxy:
    """Listens on a socket of its own. What it holds back while it is hung it passes on afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._target = Engine().socket_path
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def start(self) -> None:
        """As a daemon that has started."""
        self._server = await asyncio.start_unix_server(self._accept, self.path)

    async def stop(self) -> None:
        """As a daemon that was stopped: connections break, nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hang(self) -> None:
        """As a daemon that was sent SIGSTOP."""
        self._flowing.clear()

    def go_on(self) -> None:
        """As one that was sent SIGCONT."""
        self._flowing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_unix_connection(self._target)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(reader, their_writer))
                    both.create_task(self._pump(their_reader, writer))
            finally:
                their_writer.transport.abort()
        finally:
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                await self._flowing.wait()
                writer.write(piece)
                await writer.drain()
            await self._flowing.wait()
            writer.write_eof()


@contextlib.asynccontextmanager
async def engine_proxy(path: Path) -> AsyncIterator[EngineProxy]:
    """Running, for the length of the block."""
    proxy = EngineProxy(path)
    await proxy.start()
    try:
        yield proxy
    finally:
        proxy.go_on()
        await proxy.stop()
