"""The daemon's way into a guest: a unix-socket connection for each operation, and no trust in the replies.

One connection an operation makes back-pressure the kernel's business: a reader that stalls fills its own
socket and nobody else's. One is kept for the next when a command has ended. A guest that breaks the protocol
loses its sandbox, and only that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

from sandboxd.backends import command_users
from sandboxd.backends.channel import Broken, Channel, dial
from sandboxd.backends.guest_commands import GuestCommands
from sandboxd.backends.guest_execution import GuestExecution
from sandboxd.backends.guest_files import GuestFiles
from sandboxd.errors import InvalidRequest, Phase, SandboxLost
from sandboxd.guest import wire
from sandboxd.types import Command, Template

DEFAULT_ENV = {
    b"PATH": b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    b"HOME": b"/workspace",
    b"LANG": b"C.UTF-8",
}
# How long a broken connection waits to hear from elsewhere what the sandbox died of.
CAUSE_SECONDS = 1.0


class BackendEnded(str):
    """Why a sandbox died, where what runs the sandboxes ended and it only with that."""

    __slots__ = ()


class GuestConnection:
    """Implements `base.Connection` on the socket of a guest.

    `lost` is a future that its owner resolves with the cause when the sandbox has died; without one the
    connection watches the guest itself, and is then the only one to know.
    """

    def __init__(
        self,
        sandbox_id: str,
        socket_path: Path | str,
        template: Template,
        *,
        lost: asyncio.Future[str] | None = None,
    ) -> None:
        self._sandbox_id = sandbox_id
        self._path = socket_path
        self._template = template
        self._watched_elsewhere = lost is not None
        self._spare: Channel | None = None
        self._keeps = False
        self._lost = asyncio.get_running_loop().create_future() if lost is None else lost
        self._lost.add_done_callback(self._drop_spare)

    # -- commands

    @property
    def commands(self) -> GuestCommands:
        """See `base.Connection.commands`. Made when asked for: one that was kept would hold this connection,
        which held it, until the next full garbage collection, minutes and thousands of sandboxes later.
        """
        return GuestCommands(self.channel, self.cause)

    @property
    def files(self) -> GuestFiles:
        """See `base.Connection.files`. As `commands`."""
        return GuestFiles(self.channel, self.absolute)

    @contextlib.asynccontextmanager
    async def exec(self, command: Command) -> AsyncIterator[GuestExecution]:
        """See `base.Connection.exec`. Raises also InvalidRequest for what no kernel takes."""
        first, later = self._first(command), b"" if command.id else command.stdin
        small = len(later) <= wire.PIECE
        async with self.channel(Phase.EXEC) as channel:
            await channel.send(first + _stdin(later) if small and later else first)
            feeder = None if small else asyncio.create_task(_feed(channel, later))
            execution = GuestExecution(channel, self.cause, command)
            try:
                yield execution
            finally:
                if command.resumable and not execution.over:
                    # Said, since it outlives a connection that breaks with the daemon.
                    channel.tell(wire.frame(wire.FORGET))
                if feeder is not None:
                    feeder.cancel()
                    await asyncio.wait([feeder])
                elif execution.over:
                    self._keep(channel)

    def _first(self, command: Command) -> bytes:
        """The frame that starts a command; a named one takes its standard input along."""
        request = self._request(command)
        if not command.id:
            kind, payload = wire.EXEC, request.pack()
        else:
            named = wire.NamedRequest(command.id.encode(), request, command.stdin, _bond(command))
            kind, payload = wire.START, named.pack()
        if len(payload) > wire.MAX_REQUEST:
            what = "argv, environment and stdin" if command.id else "argv and environment"
            raise InvalidRequest(
                f"{what} take {len(payload)} bytes, at most {wire.MAX_REQUEST} fit", phase=Phase.EXEC
            )
        return wire.frame(kind, payload)

    def _request(self, command: Command) -> wire.ExecRequest:
        env = {**DEFAULT_ENV, **self._template.env, **command.env}
        command_users.check(command, self._template)
        if command.user and b"HOME" not in {**self._template.env, **command.env}:
            del env[b"HOME"]  # The guest knows that user's.
        if not command.argv or not command.argv[0]:
            raise InvalidRequest("argv is empty: name a program to run", phase=Phase.EXEC)
        if b"\0" in b"".join((*command.argv, *env, *env.values(), command.cwd or b"")):
            raise InvalidRequest("argv, cwd and environment cannot hold NUL bytes", phase=Phase.EXEC)
        request = wire.ExecRequest(list(command.argv), self.absolute(command.cwd or b""), list(env.items()))
        if command.timeout is not None:
            request.timeout = command.timeout
        if command.output_limit is not None:
            request.output_limit = command.output_limit
        request.output_tail = command.output_tail
        request.has_stdin = bool(command.stdin) or command.interactive
        request.user = command.user.encode()
        if command.terminal is not None:
            request.terminal = command.terminal
        return request

    # -- the sandbox itself

    async def ping(self) -> None:
        """See `base.Connection.ping`."""
        async with self.channel(Phase.READY) as channel:
            await channel.send(wire.frame(wire.PING, wire.KEPT))
            kind, payload = await channel.frame()
            if kind != wire.PING:
                raise wire.Malformed("something else than a ping in return")
            self._keeps = payload == wire.KEPT
            # A ping leaves a connection as it was: the first operation takes it, and need not dial.
            self._spare = channel

    async def wait_lost(self) -> str:
        """See `base.Connection.wait_lost`."""
        if not self._watched_elsewhere and not self._lost.done():
            with contextlib.suppress(SandboxLost):
                async with self.channel(Phase.READY) as channel:
                    await channel.send(wire.frame(wire.WATCH))
                    await channel.frame()
                    raise wire.Malformed("a watched guest spoke")
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """See `base.Connection.close`."""
        self._keeps = False
        self._drop_spare()
        if not self._watched_elsewhere:
            # Nobody resolves it any more, and it would hold this connection, which holds it.
            self._lost.remove_done_callback(self._drop_spare)

    def _keep(self, channel: Channel) -> None:
        """For the next operation, where none is kept already."""
        if self._keeps and self._spare is None and not self._lost.done() and channel.may_be_kept():
            self._spare = channel

    def _drop_spare(self, _: object = None) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def absolute(self, path: bytes) -> bytes:
        """The path as the guest is told it. Raises InvalidRequest."""
        if b"\0" in path:
            raise InvalidRequest("a path cannot hold NUL bytes", phase=Phase.FILE)
        return os.path.join(self._template.cwd, path)  # noqa: PTH118 - bytes

    # -- losing it

    def channel(self, phase: Phase) -> _Operation:
        """A connection for one operation. Raises SandboxLost, also for what breaks inside the block."""
        return _Operation(self, phase)

    async def take(self, phase: Phase) -> Channel:
        """The connection that is kept, or a new one. Raises SandboxLost."""
        if self._lost.done():
            raise self._loss(self._lost.result(), phase)
        channel, self._spare = self._spare, None
        try:
            return channel or Channel(await dial(self._path))
        except OSError as error:
            raise await self.cause(Broken(error.strerror), phase) from error

    def give_back(self, channel: Channel) -> None:
        """Closes one that is not kept."""
        if channel is not self._spare:
            channel.close()

    async def cause(self, error: Broken | wire.Malformed, phase: Phase) -> SandboxLost:
        """What to raise for a broken connection: the owner of `lost` often knows better why it broke."""
        if isinstance(error, wire.Malformed):
            self._condemn(f"its guest broke the protocol: {error}")
        elif self._watched_elsewhere:
            await asyncio.wait([self._lost], timeout=CAUSE_SECONDS)
        if not self._lost.done():
            self._condemn(f"its guest cannot be reached: {error}")
        return self._loss(self._lost.result(), phase)

    def _condemn(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)

    def _loss(self, why: str, phase: Phase) -> SandboxLost:
        error = SandboxLost(f"sandbox {self._sandbox_id} died: {why}", phase=phase)
        error.with_backend = isinstance(why, BackendEnded)
        return error


class _Operation:
    """The block of one: a generator would cost each three times as much."""

    __slots__ = ("_channel", "_connection", "_phase")

    def __init__(self, connection: GuestConnection, phase: Phase) -> None:
        self._connection, self._phase = connection, phase

    async def __aenter__(self) -> Channel:
        self._channel = await self._connection.take(self._phase)
        return self._channel

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Broken | wire.Malformed):
                raise await self._connection.cause(error, self._phase) from error
        finally:
            self._connection.give_back(self._channel)


def _bond(command: Command) -> int:
    if command.resumable:
        return wire.RESUMABLE
    return wire.DETACHED if command.detached else wire.HELD


def _stdin(data: bytes) -> bytes:
    return wire.frame(wire.STDIN, data) + wire.frame(wire.STDIN)


async def _feed(channel: Channel, data: bytes) -> None:
    """Sends a large standard input while output is read: one after the other would wait for ever."""
    with contextlib.suppress(Broken):
        for start in range(0, len(data), wire.PIECE):
            await channel.send(wire.frame(wire.STDIN, data[start : start + wire.PIECE]))
        await channel.send(wire.frame(wire.STDIN))
