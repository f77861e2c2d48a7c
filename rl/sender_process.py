"""The client of the sender process (`rl.sender_host`). Imports no torch."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from rl import frames
from rl.errors import ConfigError
from rl.generators.broadcast import BUFFER_BYTES, Rendezvous, SenderFailed

Kind = Literal["nccl", "gloo"]


CLOSE_SECONDS = 10.0
"""NCCL may wait for others even when it is told not to; vLLM gives it 5 s."""


class SenderProcess:
    """Starts the process when it is needed, and ends it whenever a call fails or is cut short. One call at a
    time, but for `close`. Made by `open_sender`."""

    def __init__(self, kind: Kind, log_path: Path) -> None:
        self._kind = kind
        self._log_path = log_path
        self._process: Process | None = None
        self._busy = self._opened = False

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return self._process.pid if self._process is not None else None

    @property
    def joined(self) -> bool:
        """False, too, once somebody else has ended the process."""
        return self._opened and self._process is not None and self._process.returncode is None

    async def check(self) -> None:
        """Raises ConfigError when this host cannot send."""
        try:
            await self._call("check")
        except SenderFailed as error:
            raise ConfigError(
                f"generator.weights = {self._kind!r}: {error}; choose 'gloo' for servers elsewhere, or "
                "'shared_memory' for servers on this host"
            ) from error

    async def open(self, meeting: Rendezvous) -> None:
        await self._call("open", meeting.address, meeting.port, meeting.size)
        self._opened = True

    async def send(self, path: Path, version: int) -> None:
        await self._call("send", path, version, BUFFER_BYTES)

    async def close(self) -> None:
        """A call that is under way ends with SenderFailed."""
        joined, self._opened = self.joined, False
        if self._busy or (self._process is not None and self._process.returncode is not None):
            await self._end()
        elif joined:
            with suppress(SenderFailed, TimeoutError):  # in either case the process has been ended
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._call("close")

    async def stop(self) -> None:
        """Ends the process, for good or until the next call."""
        await self._end()

    async def _call(self, name: str, *arguments: Any) -> None:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        self._busy, whole = True, False
        try:
            process.stdin.write(frames.encode((name, arguments)))
            await process.stdin.drain()
            failure: str | None = await frames.receive(process.stdout)
            whole = failure is None
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise SenderFailed(f"the sender process is gone; its log is {self._log_path}") from error
        finally:
            self._busy = False
            if not whole:
                await asyncio.shield(self._end(process))
        if failure is not None:
            raise SenderFailed(failure)

    async def _start(self) -> Process:
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rl.sender_host",
                self._kind,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self._process

    async def _end(self, process: Process | None = None) -> None:
        process = process or self._process
        if process is None:
            return
        if self._process is process:
            self._process, self._opened = None, False
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def open_sender(kind: Kind, log_path: Path) -> AsyncIterator[SenderProcess]:
    """A sender for the length of the block. Raises ConfigError when this host cannot send in this way."""
    sender = SenderProcess(kind, log_path)
    try:
        await sender.check()
        yield sender
    finally:
        await sender.stop()
