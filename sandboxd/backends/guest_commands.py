"""The named commands of a sandbox through its guest, which alone holds what is known of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from sandboxd.backends.channel import Channel
from sandboxd.backends.guest_execution import Cause, GuestExecution, refusal
from sandboxd.errors import Phase
from sandboxd.guest import wire
from sandboxd.types import COMMAND_ID, Command, CommandInfo, Kept

# More than any guest keeps or has the processes for.
KNOWN_LIMIT = 20_000


class GuestCommands:
    """Implements `base.Commands`; `channel` opens a connection, `cause` makes the error of a broken one."""

    def __init__(
        self, channel: Callable[[Phase], AbstractAsyncContextManager[Channel]], cause: Cause
    ) -> None:
        self._channel = channel
        self._cause = cause

    @contextlib.asynccontextmanager
    async def attach(
        self, command_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncIterator[GuestExecution]:
        """See `base.Commands`."""
        offsets = (stdout_offset, stderr_offset)
        request = wire.frame(wire.ATTACH, wire.ATTACH_FIELDS.pack(*offsets), command_id.encode())
        async with self._channel(Phase.EXEC) as channel:
            await channel.send(request)
            yield GuestExecution(channel, self._cause, Command((), id=command_id), offsets)

    async def signal(self, command_id: str, number: int) -> None:
        """See `base.Commands`."""
        fields = wire.SIGNAL_FIELDS.pack(number)
        await self._ask(command_id, wire.frame(wire.SEND_SIGNAL, fields, command_id.encode()))

    async def forget(self, command_id: str) -> None:
        """See `base.Commands`."""
        await self._ask(command_id, wire.frame(wire.FORGET, command_id.encode()))

    async def known(self) -> list[CommandInfo]:
        """See `base.Commands`."""
        found: list[CommandInfo] = []
        async with self._channel(Phase.EXEC) as channel:
            await channel.send(wire.frame(wire.COMMANDS))
            while True:
                kind, piece = await channel.frame()
                if kind != wire.DATA:
                    raise wire.Malformed(f"frame {kind} in a list of commands")
                if not piece:
                    return found
                found += [_info(info) for info in wire.NamedInfo.unpack_all(piece)]
                if len(found) > KNOWN_LIMIT:
                    raise wire.Malformed(f"more than {KNOWN_LIMIT} named commands")

    async def _ask(self, command_id: str, request: bytes) -> None:
        async with self._channel(Phase.EXEC) as channel:
            await channel.send(request)
            kind, payload = await channel.frame()
            if kind != wire.DONE:
                raise refusal(command_id, kind, payload)


def _info(info: wire.NamedInfo) -> CommandInfo:
    """Raises wire.Malformed."""
    name = info.id.decode(errors="replace")
    if not COMMAND_ID.fullmatch(name):
        raise wire.Malformed(f"a command of the name {name[:80]!r}")
    return CommandInfo(name, info.running, Kept(*info.kept[:2]), Kept(*info.kept[2:]))
