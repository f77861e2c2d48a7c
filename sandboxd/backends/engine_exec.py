"""One program started through the Engine's exec API: its stream and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import quote

import docker.errors

from sandboxd.backends.engine import Engine, EngineStream
from sandboxd.errors import SandboxLost

STDOUT, STDERR = 1, 2
# Of each stream of a program that is to print little; the rest falls.
PRINTED_BYTES = 16 << 20
# What a program gets to end once its input has.
ENDING_S = 5.0


class Printed(NamedTuple):
    """What a program printed."""

    stdout: bytes
    stderr: bytes


class EngineExec:
    """One exec of the Engine: a raw stream and, in the end, an exit code."""

    def __init__(self, engine: Engine, container: str, exec_id: str, stream: EngineStream) -> None:
        self._engine = engine
        self._container = container
        self._exec_id = exec_id
        self._stream = stream

    async def feed(self, data: bytes) -> None:
        """Writes to its standard input, waiting for the program to take it. Raises ConnectionError."""
        if self._stream.writer.is_closing():
            raise ConnectionResetError("the program has ended")
        self._stream.writer.write(data)
        await self._stream.writer.drain()

    def end_input(self) -> None:
        """Its standard input ends."""
        if not self._stream.writer.is_closing():
            self._stream.writer.write_eof()

    def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Its output until it ends."""
        return self._stream.frames()

    async def fill(self, data: AsyncIterator[bytes]) -> Printed:
        """Feeds it all of `data` and returns what it printed; when it ends early the rest is left.

        However this ends, the program has ended before: nothing it does comes after what is done about it.
        One that takes no notice of its input's end gets `ENDING_S`.
        """
        feeding = asyncio.create_task(self._feed_all(data))
        printing = asyncio.create_task(self._printed())
        try:
            await asyncio.wait({feeding, printing}, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
            return await asyncio.shield(printing)
        finally:
            feeding.cancel()
            try:
                await asyncio.wait({feeding})
                self.end_input()
                await asyncio.wait({printing}, timeout=ENDING_S)
                printing.cancel()
                await asyncio.wait({printing})
            finally:
                printing.cancel()
                self.close()

    async def _feed_all(self, data: AsyncIterator[bytes]) -> None:
        async for piece in data:
            with contextlib.suppress(ConnectionError):  # it ended, and its exit code says why
                await self.feed(piece)
        self.end_input()

    async def _printed(self) -> Printed:
        kept = {STDOUT: bytearray(), STDERR: bytearray()}
        async for kind, piece in self._stream.frames():
            kept[kind] += piece[: PRINTED_BYTES - len(kept[kind])]
        return Printed(bytes(kept[STDOUT]), bytes(kept[STDERR]))

    async def finish(self) -> Printed:
        """Ends its input and returns all it printed; for programs that print little."""
        try:
            self.end_input()
            return await self._printed()
        finally:
            self.close()

    def close(self) -> None:
        """Drops the connection; the Engine then ends the program's input."""
        self._stream.close()

    async def exit_code(self) -> int:
        """Waits for the end; a program that closed its output may still run."""
        found = await self._inspect()
        if not found["Running"]:
            return int(found["ExitCode"] or 0)
        filters = quote(f'{{"container":["{self._container}"],"event":["exec_die"]}}')
        async with self._engine.lines("GET", f"/events?filters={filters}") as events:
            found = await self._inspect()  # It may have ended before the events were listened to.
            if not found["Running"]:
                return int(found["ExitCode"] or 0)
            async for event in events:
                attributes = event.get("Actor", {}).get("Attributes", {})
                if attributes.get("execID") == self._exec_id:
                    return int(attributes.get("exitCode", 0))
        raise SandboxLost("the Docker Engine went away while a command ran")

    async def _inspect(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await self._engine.call(lambda api: api.exec_inspect(self._exec_id))
        except docker.errors.APIError as error:
            raise SandboxLost(f"the container is gone: {error.explanation}") from error
        return found
