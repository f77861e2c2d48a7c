"""A command that runs in a guest, as the daemon hears and tells it, and no trust in what it hears."""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from sandboxd.backends.channel import Broken, Channel
from sandboxd.errors import BackendUnavailable, CommandExists, CommandNotFound, Phase, SandboxLost
from sandboxd.guest import wire
from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout

# A guest owes the end of a command this long after its timeout, when nothing holds up its output.
GUEST_SLACK_SECONDS = 15.0
# Pieces of output that are there together are told as one, until it has so many bytes.
PIECES_BYTES = 256 << 10
# No command of a sandbox has run for longer.
LONGEST_SECONDS = 1e9

Cause = Callable[[Broken | wire.Malformed, Phase], Awaitable[SandboxLost]]


class GuestExecution:
    """Implements `base.Execution`: what the caller says as frames, and the guest's frames as events, checked:
    one start, offsets that only grow, one end. Holes between them are for named commands, and before a tail.

    `offsets`: the output comes from there on. `cause` makes the error of a broken connection.
    """

    def __init__(
        self, channel: Channel, cause: Cause, command: Command, offsets: tuple[int, int] = (0, 0)
    ) -> None:
        self._channel = channel
        self._cause = cause
        self._id = command.id
        self._end_by: float | None = None
        if command.timeout is not None:
            self._end_by = time.monotonic() + command.timeout + GUEST_SLACK_SECONDS
        self._offsets = {wire.STDOUT: offsets[0], wire.STDERR: offsets[1]}
        self._uncut = set(self._offsets) if command.output_tail else set()
        self._room: float = math.inf
        if command.output_limit is not None:
            self._room = command.output_limit + 2 * command.output_tail
        # Its caller is told all of it at its end.
        self._at_once = command.resumable
        self._started = False
        self._ended = False

    @property
    def over(self) -> bool:
        """Its end was told."""
        return self._ended

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = self._event(*(self._channel.arrived() or await self._frame()))
        except (Broken, wire.Malformed) as error:
            raise await self._cause(error, Phase.EXEC) from error
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
            return await self._channel.frame(passes_start=self._at_once)
        # Not before the slack from now: a slow reader may have held up the frames itself.
        patience = max(self._end_by - time.monotonic(), GUEST_SLACK_SECONDS)
        try:
            return await self._channel.frame(patience, passes_start=self._at_once)
        except TimeoutError as error:
            raise wire.Malformed("a command did not end after its timeout") from error

    def _event(self, kind: int, payload: bytes) -> Event:
        if kind == wire.STARTED and not self._started:
            self._started = True
            return Started()
        if kind == wire.ERROR and self._id and (not self._started or payload == CANCELLED):
            self._ended = True
            raise refusal(self._id, kind, payload)
        if kind in self._offsets and self._started and len(payload) > wire.OFFSET.size:
            return self._output(kind, payload)
        if kind == wire.EXITED and len(payload) >= wire.EXITED_FIELDS.size:
            return self._exited(payload)
        raise wire.Malformed(f"frame {kind} of {len(payload)} bytes is out of place")

    def _output(self, kind: int, payload: bytes) -> Event:
        """What there is of one stream in a row, as one event: each costs more than a copy of its bytes."""
        (begin,) = wire.OFFSET.unpack_from(payload)
        pieces = [self._piece(kind, payload)]
        size = len(pieces[0])
        while size < PIECES_BYTES and (more := self._channel.arrived_output(kind, begin + size)) is not None:
            pieces.append(self._piece(kind, more))
            size += len(pieces[-1])
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return Stdout(data, begin) if kind == wire.STDOUT else Stderr(data, begin)

    def _piece(self, kind: int, payload: bytes) -> bytes:
        (offset,) = wire.OFFSET.unpack_from(payload)
        expected = self._offsets[kind]
        if offset > expected and (self._id or kind in self._uncut):
            self._uncut.discard(kind)
        elif offset != expected:
            raise wire.Malformed(f"output at offset {offset} where {expected} is next")
        data = payload[wire.OFFSET.size :]
        self._offsets[kind] = offset + len(data)
        self._room -= len(data)
        if self._room < 0 or self._offsets[kind] > wire.LARGEST:
            raise wire.Malformed("more output than the command's limit")
        return data

    def _exited(self, payload: bytes) -> Event:
        reason, code, number, wall, cpu = wire.EXITED_FIELDS.unpack_from(payload)
        if reason >= len(wire.REASONS) or self._started == (wire.REASONS[reason] == "NOT_STARTED"):
            raise wire.Malformed(f"an end of kind {reason} is out of place")
        if not (0 <= wall <= LONGEST_SECONDS and 0 <= cpu <= LONGEST_SECONDS):
            raise wire.Malformed(f"an end after {wall} s, {cpu} s of them computing")
        detail = payload[wire.EXITED_FIELDS.size :].decode(errors="replace")
        return Exited(ExitReason[wire.REASONS[reason]], code, number, wall, cpu, detail)


# After its start a named command is told no other error.
CANCELLED = wire.ERROR_FIELDS.pack(errno.ECANCELED)


def refusal(
    command_id: str, kind: int, payload: bytes
) -> CommandExists | CommandNotFound | BackendUnavailable:
    """What to raise for the guest's answer about a named command. Raises wire.Malformed for what is none."""
    number = 0
    if kind == wire.ERROR and len(payload) >= wire.ERROR_FIELDS.size:
        (number,) = wire.ERROR_FIELDS.unpack_from(payload)
    if number == errno.EEXIST:
        return CommandExists.named(command_id)
    if number == errno.ENOENT:
        return CommandNotFound.named(command_id)
    if number == errno.ECANCELED:
        return BackendUnavailable.ended_with_call(command_id)
    raise wire.Malformed(f"frame {kind} is no answer to a request about a command")
