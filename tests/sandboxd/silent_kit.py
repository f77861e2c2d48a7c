"""A connection that runs nothing and keeps its files in memory: no thread or process comes in between."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sandboxd.backends.fake import FakeConnection
from sandboxd.errors import FileNotFound
from sandboxd.types import Command, Event, Exited, ExitReason, FileInfo, FileKind


class SilentFiles:
    """Those calls of `base.Files` that a reset makes."""

    def __init__(self) -> None:
        self._files: dict[bytes, bytes] = {}

    async def write(self, path: bytes, data: AsyncIterator[bytes], mode: int) -> int:
        self._files[path] = b"".join([piece async for piece in data])
        return len(self._files[path])

    async def stat(self, path: bytes) -> FileInfo:
        if path not in self._files:
            raise FileNotFound(f"no {path!r}")
        return FileInfo(path, FileKind.FILE, len(self._files[path]), 0o600, 0.0)

    async def read(self, path: bytes) -> AsyncIterator[bytes]:
        await self.stat(path)
        yield self._files[path]

    async def list_directory(self, path: bytes) -> AsyncIterator[FileInfo]:
        yield await self.stat(path)


class Silent:
    """Implements `base.Connection` beside a fake one, whose life and death it shares."""

    def __init__(self, inner: FakeConnection) -> None:
        self.files: Any = SilentFiles()
        self.commands = inner.commands
        self.ping, self.wait_lost, self.close = inner.ping, inner.wait_lost, inner.close

    @contextlib.asynccontextmanager
    async def exec(self, command: Command) -> AsyncIterator[Any]:
        await self.ping()

        async def events() -> AsyncIterator[Event]:
            yield Exited(ExitReason.NOT_STARTED, 127)

        yield events()
