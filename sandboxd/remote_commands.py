"""What a client does with commands that have an id, and so outlive the call that started them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Unpack

from sandboxd import replies, requests
from sandboxd.errors import SandboxLost
from sandboxd.replies import ExecResult
from sandboxd.requests import CommandOptions, Word, message
from sandboxd.status import translated
from sandboxd.types import CommandInfo, Event
from sandboxd.v1 import sandbox_service_pb2 as pb


class DetachedCommand:
    """A command by its id; making one makes no call. It lives in the sandbox, whoever else knows its id.

    All calls raise CommandNotFound, SandboxLost, LeaseExpired.
    """

    def __init__(self, stub: Any, sandbox: str, command_id: str) -> None:
        self.id = command_id
        self._stub, self._sandbox = stub, sandbox

    async def attach(self, *, stdout_offset: int = 0, stderr_offset: int = 0) -> AsyncGenerator[Event, None]:
        """Yields what the command told and will tell, its output from these offsets on; `Exited` is the last.

        Of each stream the last 1 MiB is kept. When what was asked for is older, or this reader falls behind,
        the next piece's offset says what is missing. Leaving the iterator leaves the command as it is.
        """
        request = message(
            pb.AttachCommandRequest,
            name=self._sandbox,
            command_id=self.id,
            stdout_offset=stdout_offset,
            stderr_offset=stderr_offset,
        )
        call = self._stub.AttachCommand(request)
        try:
            with translated():
                async for response in call:
                    yield replies.event(response)
        finally:
            call.cancel()

    async def wait(self) -> ExecResult:
        """Waits for its end and returns how it ended, with what is kept of its output."""
        gathered = replies.Gathered()
        async for event in self.attach():
            gathered.add(event)
        if gathered.result is None:
            raise SandboxLost(f"command {self.id!r} of {self._sandbox} ended without saying how")
        return gathered.result

    async def signal(self, number: int) -> None:
        """Signals its process group; on a terminal, the group in its foreground. Dropped after its end."""
        with translated():
            await self._stub.SignalCommand(
                message(pb.SignalCommandRequest, name=self._sandbox, command_id=self.id, signal=number)
            )

    async def forget(self) -> None:
        """Frees its id and what is kept of it; if it still runs, its whole process tree is killed."""
        with translated():
            await self._stub.ForgetCommand(
                message(pb.ForgetCommandRequest, name=self._sandbox, command_id=self.id)
            )

    def __repr__(self) -> str:
        return f"<DetachedCommand {self.id!r}>"


class RemoteCommands:
    """The calls of `Box` about commands that have an id."""

    name: str
    _stub: Any

    async def start(
        self,
        argv: Sequence[Word],
        *,
        command_id: str | None = None,
        stdin: bytes = b"",
        **options: Unpack[CommandOptions],
    ) -> DetachedCommand:
        """Starts a command that goes on until it ends or the sandbox does, and returns when it was started.

        `command_id` has lower-case letters, digits and dashes; without one it is drawn. A program that could
        not be executed is told by `wait`. Raises CommandExists, SandboxLost, LeaseExpired.
        """
        request = requests.command(self.name, argv, options, stdin)
        name = command_id or f"c{uuid.uuid4().hex}"
        request.MergeFrom(message(pb.ExecCommandRequest, command_id=name, detached=True))
        call = self._stub.ExecCommand(request)
        try:
            with translated():
                async for _ in call:
                    return self.command(name)
        finally:
            call.cancel()
        raise SandboxLost(f"command {name!r} of {self.name} was started without a word")

    def command(self, command_id: str) -> DetachedCommand:
        """The command of an id, wherever it was started; whether there is one its calls tell."""
        return DetachedCommand(self._stub, self.name, command_id)

    def attach(
        self, command_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncGenerator[Event, None]:
        """As `DetachedCommand.attach`."""
        return self.command(command_id).attach(stdout_offset=stdout_offset, stderr_offset=stderr_offset)

    async def list_commands(self) -> list[CommandInfo]:
        """The commands with an id that run or are kept, the ended ones in the order of their ends."""
        with translated():
            reply = await self._stub.ListCommands(pb.ListCommandsRequest(name=self.name))
        return [replies.command_info(info) for info in reply.commands]
