"""A connection to the daemon that a test holds up or breaks."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path


class Relay:
    """Stands between a client and the daemon: passes on bytes, holds replies back, and breaks."""

    def __init__(self, socket: Path, target: str) -> None:
        self.address = f"unix:{socket}"
        self._socket, self._target = socket, target.removeprefix("unix:")
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_unix_server(self._serve, self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        self.go_on()
        async with asyncio.timeout(20):
            while self._writers:
                await asyncio.sleep(0.01)
        self._socket.unlink()

    def hold(self) -> None:
        """From now on nothing of what the daemon says arrives."""
        self._flowing.clear()

    def go_on(self) -> None:
        """What was held back arrives."""
        self._flowing.set()

    def cut(self) -> None:
        """Breaks every connection, on both sides."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, target = await asyncio.open_unix_connection(self._target)
        writers = {writer, target}
        self._writers |= writers
        try:
            ways = [self._pass(reader, target, hold=False), self._pass(source, writer, hold=True)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        finally:
            for each in writers:
                each.transport.abort()
            self._writers -= writers

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, hold: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if hold:
                    await self._flowing.wait()
                writer.write(data)
                await writer.drain()
