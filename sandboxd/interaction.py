"""A command that runs in a leased sandbox and is talked to meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from sandboxd import replies
from sandboxd.errors import SandboxdError, SandboxLost
from sandboxd.requests import in_pieces, message
from sandboxd.status import translated
from sandboxd.types import Event, Exited
from sandboxd.v1 import sandbox_service_pb2 as pb


class Interaction:
    """What `Box.interact` gives: `async for event in running`, and calls that reach the command.

    Events are `Started`, output and `Exited`. Waiting for one may be cancelled: the next wait gets it.
    What is told to a command after its end is dropped; the events say how it ended.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._reading: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[Any] | None = None
        self._telling = asyncio.Lock()
        self._over = False

    async def start(self, command: pb.ExecCommandRequest) -> None:
        """The first message; what is wrong with it is raised by the first event."""
        await self._tell(pb.InteractCommandRequest(start=command))

    def __aiter__(self) -> Interaction:
        return self

    async def __anext__(self) -> Event:
        """Raises SandboxLost when the sandbox died, LeaseExpired when its lease ran out."""
        if self._over:
            raise StopAsyncIteration
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        # Shielded: a cancelled read would end the call, and with it the command.
        with translated():
            response = await asyncio.shield(self._reading)
        self._reading = None
        if response is grpc.aio.EOF:
            raise SandboxLost("the command ended without saying how")
        event = replies.event(response)
        self._over = isinstance(event, Exited)
        return event

    async def write(self, data: bytes) -> None:
        """More standard input; waits while the command reads none and what is on its way is much."""
        for piece in in_pieces(data):
            await self._tell(pb.InteractCommandRequest(stdin=piece))

    async def end_input(self) -> None:
        """The end of standard input; on a terminal it types Ctrl-D."""
        request = pb.InteractCommandRequest()
        request.stdin_end.SetInParent()
        await self._tell(request)

    async def signal(self, number: int) -> None:
        """Signals the command's process group; on a terminal, the group in its foreground."""
        await self._tell(message(pb.InteractCommandRequest, signal=number))

    async def resize(self, rows: int, columns: int) -> None:
        """The terminal has a new size; nothing without one."""
        size = message(pb.TerminalSize, rows=rows, columns=columns)
        await self._tell(pb.InteractCommandRequest(resize=size))

    async def _tell(self, request: pb.InteractCommandRequest) -> None:
        async with self._telling:
            self._writing = asyncio.create_task(self._call.write(request))
            with contextlib.suppress(asyncio.InvalidStateError, SandboxdError), translated():
                await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Ends the call, and with it the command if it still runs. Idempotent."""
        self._call.cancel()
        left = [task for task in (self._reading, self._writing) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
