"""The daemon's way into a guest: a unix-socket connection for each operation, and no trust in the replies.

One connection an operation makes back-pressure the kernel's business: a reader that stalls fills its own
socket and nobody else's. A guest that breaks the protocol loses its sandbox, and only that.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxd.backends.channel import Broken, Channel, dial
from sandboxd.backends.guest_files import GuestFiles
from sandboxd.errors import InvalidRequest, Phase, SandboxLost
from sandboxd.guest import wire
from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout, Template

DEFAULT_ENV = {
    b"PATH": b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    b"HOME": b"/workspace",
    b"LANG": b"C.UTF-8",
}
# A guest owes the end of a command this long after its timeout, when nothing holds up its output.
GUEST_SLACK_SECONDS = 15.0
# How long a broken connection waits to hear from elsewhere what the sandbox died of.
CAUSE_SECONDS = 1.0
# No command of a sandbox has run for longer.
LONGEST_SECONDS = 1e9


class GuestConnection:
    """Implements `base.Connection` on the socket of a guest.

    `lost` is a future that its owner resolves with the cause when the sandbox has died; without one the
    connection watches the guest itself, and is then the only one to know.
    """

    def __init__(
        self,
        sandbox_id: str,
        socket_path: Path,
        template: Template,
        *,
        lost: asyncio.Future[str] | None = None,
    ) -> None:
        self._sandbox_id = sandbox_id
        self._path = socket_path
        self._template = template
        self._watched_elsewhere = lost is not None
        self._spare: Channel | None = None
        self._lost = asyncio.get_running_loop().create_future() if lost is None else lost
        self._lost.add_done_callback(lambda _: self._drop_spare())
        self.files = GuestFiles(self.channel, self.absolute)

    # -- commands

    @contextlib.asynccontextmanager
    async def exec(self, command: Command) -> AsyncIterator[_Execution]:
        """See `base.Connection.exec`. Raises also InvalidRequest for what no kernel takes."""
        first = wire.frame(wire.EXEC, self._request(command).pack())
        small = len(command.stdin) <= wire.PIECE
        async with self.channel(Phase.EXEC) as channel:
            await channel.send(first + _stdin(command.stdin) if small and command.stdin else first)
            feeder = None if small else asyncio.create_task(_feed(channel, command.stdin))
            try:
                yield _Execution(self, channel, command)
            finally:
                if feeder is not None:
                    feeder.cancel()
                    await asyncio.wait([feeder])

    def _request(self, command: Command) -> wire.ExecRequest:
        env = {**DEFAULT_ENV, **self._template.env, **command.env}
        pairs = [string for pair in env.items() for string in pair]
        if not command.argv or not command.argv[0]:
            raise InvalidRequest("argv is empty: name a program to run", phase=Phase.EXEC)
        if any(b"\0" in string for string in (*command.argv, *pairs, command.cwd or b"")):
            raise InvalidRequest("argv, cwd and environment cannot hold NUL bytes", phase=Phase.EXEC)
        request = wire.ExecRequest(list(command.argv), self.absolute(command.cwd or b""), list(env.items()))
        if command.timeout is not None:
            request.timeout = command.timeout
        if command.output_limit is not None:
            request.output_limit = command.output_limit
        request.output_tail = command.output_tail
        request.has_stdin = bool(command.stdin) or command.interactive
        if command.terminal is not None:
            request.terminal = command.terminal
        if (size := len(request.pack())) > wire.MAX_REQUEST:
            raise InvalidRequest(
                f"argv and environment take {size} bytes, at most {wire.MAX_REQUEST} fit", phase=Phase.EXEC
            )
        return request

    # -- the sandbox itself

    async def ping(self) -> None:
        """See `base.Connection.ping`."""
        async with self.channel(Phase.READY) as channel:
            await channel.send(wire.frame(wire.PING))
            if (await channel.frame())[0] != wire.PING:
                raise wire.Malformed("something else than a ping in return")
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
        self._drop_spare()

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def absolute(self, path: bytes) -> bytes:
        """The path as the guest is told it. Raises InvalidRequest."""
        if b"\0" in path:
            raise InvalidRequest("a path cannot hold NUL bytes", phase=Phase.FILE)
        return os.path.join(self._template.cwd, path)  # noqa: PTH118 - bytes

    # -- losing it

    @contextlib.asynccontextmanager
    async def channel(self, phase: Phase) -> AsyncIterator[Channel]:
        """A connection for one operation. Raises SandboxLost, also for what breaks inside the block."""
        if self._lost.done():
            raise self._loss(self._lost.result(), phase)
        channel, self._spare = self._spare, None
        try:
            channel = channel or Channel(await dial(self._path))
        except OSError as error:
            raise await self.cause(Broken(error.strerror), phase) from error
        try:
            yield channel
        except (Broken, wire.Malformed) as error:
            raise await self.cause(error, phase) from error
        finally:
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
        return SandboxLost(f"sandbox {self._sandbox_id} died: {why}", phase=phase)


class _Execution:
    """Implements `base.Execution`: what the caller says as frames, and the guest's frames as events, checked:
    one start, offsets without a gap but for the one before a tail, one end.
    """

    def __init__(self, owner: GuestConnection, channel: Channel, command: Command) -> None:
        self._owner = owner
        self._channel = channel
        self._end_by: float | None = None
        if command.timeout is not None:
            self._end_by = time.monotonic() + command.timeout + GUEST_SLACK_SECONDS
        self._offsets = {wire.STDOUT: 0, wire.STDERR: 0}
        self._uncut = set(self._offsets) if command.output_tail else set()
        self._room: float = math.inf
        if command.output_limit is not None:
            self._room = command.output_limit + 2 * command.output_tail
        self._started = False
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = self._event(*await self._frame())
        except (Broken, wire.Malformed) as error:
            raise await self._owner.cause(error, Phase.EXEC) from error
        self._ended = isinstance(event, Exited)
        return event

    async def write(self, data: bytes) -> None:
        """See `base.Execution`."""
        for start in range(0, len(data), wire.PIECE):
            await self._tell(wire.STDIN, data[start : start + wire.PIECE])

    async def end_input(self) -> None:
        """See `base.Execution`."""
        await self._tell(wire.STDIN)

    async def signal(self, number: int) -> None:
        """See `base.Execution`."""
        await self._tell(wire.SIGNAL, wire.SIGNAL_FIELDS.pack(number))

    async def resize(self, rows: int, columns: int) -> None:
        """See `base.Execution`."""
        await self._tell(wire.RESIZE, wire.SIZE_FIELDS.pack(rows, columns))

    async def _tell(self, kind: int, payload: bytes = b"") -> None:
        if not self._ended:
            with contextlib.suppress(Broken):
                await self._channel.send(wire.frame(kind, payload))

    async def _frame(self) -> tuple[int, bytes]:
        if self._end_by is None:
            return await self._channel.frame()
        # Not before the slack from now: a slow reader may have held up the frames itself.
        patience = max(self._end_by - time.monotonic(), GUEST_SLACK_SECONDS)
        try:
            async with asyncio.timeout(patience):
                return await self._channel.frame()
        except TimeoutError as error:
            raise wire.Malformed("a command did not end after its timeout") from error

    def _event(self, kind: int, payload: bytes) -> Event:
        if kind == wire.STARTED and not self._started:
            self._started = True
            return Started()
        if kind in self._offsets and self._started and len(payload) > wire.OFFSET.size:
            return self._output(kind, payload)
        if kind == wire.EXITED and len(payload) >= wire.EXITED_FIELDS.size:
            return self._exited(payload)
        raise wire.Malformed(f"frame {kind} of {len(payload)} bytes is out of place")

    def _output(self, kind: int, payload: bytes) -> Event:
        (offset,) = wire.OFFSET.unpack_from(payload)
        expected = self._offsets[kind]
        if offset > expected and kind in self._uncut:
            self._uncut.discard(kind)
        elif offset != expected:
            raise wire.Malformed(f"output at offset {offset} where {expected} is next")
        data = payload[wire.OFFSET.size :]
        self._offsets[kind] = offset + len(data)
        self._room -= len(data)
        if self._room < 0 or self._offsets[kind] > wire.LARGEST:
            raise wire.Malformed("more output than the command's limit")
        return Stdout(data, offset) if kind == wire.STDOUT else Stderr(data, offset)

    def _exited(self, payload: bytes) -> Event:
        reason, code, number, wall, cpu = wire.EXITED_FIELDS.unpack_from(payload)
        if reason >= len(wire.REASONS) or self._started == (wire.REASONS[reason] == "NOT_STARTED"):
            raise wire.Malformed(f"an end of kind {reason} is out of place")
        if not (0 <= wall <= LONGEST_SECONDS and 0 <= cpu <= LONGEST_SECONDS):
            raise wire.Malformed(f"an end after {wall} s, {cpu} s of them computing")
        detail = payload[wire.EXITED_FIELDS.size :].decode(errors="replace")
        return Exited(ExitReason[wire.REASONS[reason]], code, number, wall, cpu, detail)


def _stdin(data: bytes) -> bytes:
    return wire.frame(wire.STDIN, data) + wire.frame(wire.STDIN)


async def _feed(channel: Channel, data: bytes) -> None:
    """Sends a large standard input while output is read: one after the other would wait for ever."""
    with contextlib.suppress(Broken):
        for start in range(0, len(data), wire.PIECE):
            await channel.send(wire.frame(wire.STDIN, data[start : start + wire.PIECE]))
        await channel.send(wire.frame(wire.STDIN))
