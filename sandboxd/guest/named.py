"""Commands with an id: they can outlive who started them, and any number of connections may read them."""

from __future__ import annotations

import errno
import struct
from collections.abc import Generator

from sandboxd.guest import transfer, wire
from sandboxd.guest.commands import CommandTable, Running
from sandboxd.guest.outlet import Outlet
from sandboxd.guest.peer import Operation, Peer
from sandboxd.guest.replay import ENDED_LIMIT, Replay

KINDS = (wire.START, wire.ATTACH, wire.SEND_SIGNAL, wire.COMMANDS, wire.FORGET)
# With more output than this in all fewer are kept: it is memory of the sandbox.
ENDED_BYTES = 16 << 20
# In one frame of a listing.
LISTED_AT_ONCE = 256


class NamedCommands:
    """Those that run, and those that have ended and are kept, by their ids."""

    def __init__(self, table: CommandTable) -> None:
        self._table = table
        # The ended ones in the order of their ends.
        self._records: dict[bytes, Record] = {}

    def begin(self, peer: Peer, kind: int, payload: bytes) -> Operation:
        """Raises wire.Malformed; an id that is taken or unknown the daemon is told."""
        try:
            return self._begin(peer, kind, payload)
        except OSError as error:
            return transfer.failure(peer, error)

    def _begin(self, peer: Peer, kind: int, payload: bytes) -> Operation:
        if kind == wire.START:
            return self._start(peer, wire.NamedRequest.unpack(payload))
        if kind == wire.ATTACH:
            offsets, name = _split(wire.ATTACH_FIELDS, payload)
            return Follower(peer, self._record(name), offsets)
        if kind == wire.COMMANDS:
            return transfer.Sender(peer, self._listing())
        if kind == wire.SEND_SIGNAL:
            _, name = _split(wire.SIGNAL_FIELDS, payload)
            self._record(name).received(wire.SIGNAL, payload[: wire.SIGNAL_FIELDS.size])
        else:
            self._forget(payload)
        peer.send(wire.frame(wire.DONE, wire.OFFSET.pack(0)))
        return Operation()

    def _record(self, name: bytes) -> Record:
        if name not in self._records:
            raise OSError(errno.ENOENT, "no such command")
        return self._records[name]

    def _start(self, peer: Peer, request: wire.NamedRequest) -> Operation:
        if request.id in self._records:
            raise OSError(errno.EEXIST, "the id is taken")
        record = self._records[request.id] = Record(self, request.id)
        try:
            record.running = self._table.start(request.command, record)
        except wire.Malformed:
            del self._records[request.id]
            raise
        if request.stdin:
            record.received(wire.STDIN, request.stdin)
            record.received(wire.STDIN, b"")
        return Follower(peer, record, (0, 0), holds=not request.detached)

    def _forget(self, name: bytes) -> None:
        record = self._record(name)
        del self._records[name]
        record.abandon()

    def _listing(self) -> Generator[bytes, None, None]:
        infos = [record.info() for record in self._records.values()]
        for start in range(0, len(infos), LISTED_AT_ONCE):
            yield b"".join(infos[start : start + LISTED_AT_ONCE])

    def ended(self, record: Record) -> None:
        """Makes room for one that has ended, if it was not forgotten before."""
        if self._records.get(record.id) is not record:
            return
        self._records[record.id] = self._records.pop(record.id)
        ended = [each for each in self._records.values() if each.ending]
        count, held = len(ended), sum(each.held for each in ended)
        for oldest in ended:
            if count <= ENDED_LIMIT and held <= ENDED_BYTES:
                return
            count, held = count - 1, held - oldest.held
            del self._records[oldest.id]


def _split(fields: struct.Struct, payload: bytes) -> tuple[tuple[int, ...], bytes]:
    if len(payload) < fields.size:
        raise wire.Malformed("a request about a command is too short")
    return fields.unpack_from(payload), payload[fields.size :]


class Record(Outlet):
    """One named command: the last of what it told, and who reads it. It is held up by none of them."""

    def __init__(self, owner: NamedCommands, name: bytes) -> None:
        self.id = name
        self.running: Running | None = None
        """Until the end."""
        self.beginning = b""
        """The STARTED frame, once there was a start."""
        self.ending = b""
        """The EXITED frame, once there was an end."""
        self.streams = {wire.STDOUT: Replay(), wire.STDERR: Replay()}
        self.followers: list[Follower] = []
        self._owner = owner

    @property
    def held(self) -> int:
        """Bytes of output that are kept."""
        return sum(stream.held for stream in self.streams.values())

    def info(self) -> bytes:
        """How it is listed."""
        kept = [offset for stream in self.streams.values() for offset in (stream.begin, stream.end)]
        return wire.NamedInfo(self.id, tuple(kept), running=not self.ending).pack()

    def received(self, kind: int, payload: bytes) -> None:
        """A frame for the command itself. Raises wire.Malformed."""
        if self.running is not None:
            self.running.received(kind, payload)

    def abandon(self) -> None:
        """Ends the command if it runs."""
        if self.running is not None:
            self.running.closed()

    def started(self, frame: bytes) -> None:
        self.beginning = frame

    def output(self, kind: int, offset: int, data: bytes) -> None:
        self.streams[kind].add(offset, data)
        self._tell()

    def ended(self, frame: bytes) -> None:
        self.ending = frame
        # It refers to this one: together they would outlive their last use.
        self.running = None
        self._tell()
        self._owner.ended(self)

    def _tell(self) -> None:
        for follower in self.followers:
            follower.drained()


class Follower(Operation):
    """One connection that reads a named command, from a place of its own in each stream.

    What it does not take in time it misses: it goes on with the oldest that is kept. A command that it
    `holds` ends with it.
    """

    def __init__(self, peer: Peer, record: Record, offsets: tuple[int, ...], *, holds: bool = False) -> None:
        self._peer = peer
        self._record = record
        self._holds = holds
        self._next = {wire.STDOUT: offsets[0], wire.STDERR: offsets[1]}
        self._order = list(record.streams)
        self._told_start = False
        self._told_end = False
        record.followers.append(self)
        self.drained()

    def received(self, kind: int, payload: bytes) -> None:
        self._record.received(kind, payload)

    def drained(self) -> None:
        """Sends on what the connection takes."""
        while not self._peer.congested:
            frame = self._frame()
            if not frame:
                return
            self._peer.send(frame)

    def _frame(self) -> bytes:
        """What is to be told next; nothing while there is nothing."""
        record = self._record
        if record.beginning and not self._told_start:
            self._told_start = True
            return record.beginning
        for kind in self._order:
            found = record.streams[kind].after(self._next[kind])
            if found is not None:
                offset, data = found
                self._next[kind] = offset + len(data)
                # The other stream is next, so that neither waits for the end of the other.
                self._order.reverse()
                return wire.frame(kind, wire.OFFSET.pack(offset), data)
        if self._told_end:
            return b""
        self._told_end = bool(record.ending)
        return record.ending

    def closed(self) -> None:
        self._record.followers.remove(self)
        if self._holds:
            self._record.abandon()
