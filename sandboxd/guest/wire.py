"""Frames between the daemon and a guest, and how requests pack their fields; native/wire.h is the other side.

A frame is one type byte, the payload's length as an unsigned 32-bit big-endian number, and the payload.
A connection serves one operation at a time, named by its first frame; nothing else follows that but what
belongs to it. A frame that names another lets go of it, as closing the connection does: what still runs is
ended. So one that is over may be followed by the next, in a guest that answers a ping of KEPT with the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

HEADER = struct.Struct("!BI")
OFFSET = struct.Struct("!Q")
EXEC_FIELDS = struct.Struct("!dqIBHHII")
EXITED_FIELDS = struct.Struct("!Biidd")
WRITE_FIELDS = struct.Struct("!I")
READ_FIELDS = struct.Struct("!Qq")
REMOVE_FIELDS = struct.Struct("!B")
ERROR_FIELDS = struct.Struct("!I")
# Kind, mode, size, nanoseconds since 1970, and the lengths of name and target.
INFO_FIELDS = struct.Struct("!BIQqHI")
SIGNAL_FIELDS = struct.Struct("!I")
# Rows and columns.
SIZE_FIELDS = struct.Struct("!HH")
# Its bond, and the lengths of its id and its standard input.
NAMED_FIELDS = struct.Struct("!BBI")
# The flags of a command: it has an input; the name of its user follows its working directory.
HAS_STDIN, HAS_USER = 1, 2
# Offsets in stdout and stderr.
ATTACH_FIELDS = struct.Struct("!QQ")
# Whether it runs, what is kept of stdout and of stderr (from, to), and the length of its id.
NAMED_INFO_FIELDS = struct.Struct("!BQQQQB")

_LENGTH = struct.Struct("!I")

# What the daemon sends.
EXEC, STDIN, WRITE, READ, PING, WATCH, SIGNAL, RESIZE = b"EIWRPVKG"
STAT, LIST, REMOVE, PACK, UNPACK = b"TLMAU"
# Of named commands.
START, ATTACH, SEND_SIGNAL, COMMANDS, FORGET = b"BHQCF"
# The bonds of a named command to the connection that starts it.
HELD, DETACHED, RESUMABLE = range(3)
# What both send: a piece of a file; an empty one ends it.
DATA = ord("D")
# The payload of a ping: are connections kept?
KEPT = b"\1"
# What the guest sends.
STARTED, STDOUT, STDERR, EXITED, DONE, ERROR = b"S12ZOX"

# The largest payload that a guest may send; the daemon drops a guest that announces more.
MAX_REPLY = (1 << 20) + OFFSET.size
# The largest that the daemon may send: the kernel bounds argv and environment to about 2 MiB anyway.
MAX_REQUEST = 4 << 20
# A piece of output or of a file.
PIECE = 64 << 10

# The largest count, size or offset that either side may speak of.
LARGEST = (1 << 63) - 1

# What is at a path.
REGULAR, DIRECTORY, SYMLINK, OTHER = range(1, 5)

# The reasons of an EXITED frame, in the order of their codes.
REASONS = ("EXITED", "SIGNALED", "TIMED_OUT", "OOM_KILLED", "OUTPUT_LIMIT_EXCEEDED", "NOT_STARTED")


class Malformed(Exception):
    """The other side broke the protocol."""


def frame(kind: int, *parts: bytes) -> bytes:
    """One frame, its payload joined from `parts`."""
    return b"".join((HEADER.pack(kind, sum(map(len, parts))), *parts))


def split(buffer: bytearray, limit: int) -> tuple[int, bytes] | None:
    """Takes the first whole frame off `buffer`, or returns None while it is incomplete.

    Raises Malformed as soon as a header announces more than `limit` bytes.
    """
    if len(buffer) < HEADER.size:
        return None
    kind, length = HEADER.unpack_from(buffer)
    if length > limit:
        raise Malformed(f"a frame of {length} bytes where at most {limit} are allowed")
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    payload = bytes(memoryview(buffer)[HEADER.size : end])
    del buffer[:end]
    return kind, payload


def pack_strings(strings: Iterable[bytes]) -> bytes:
    """Byte strings, each after its length."""
    return b"".join([part for string in strings for part in (_LENGTH.pack(len(string)), string)])


class Info:
    """What is at a path: `mode` its permission bits, `target` where a link leads."""

    __slots__ = ("kind", "mode", "mtime_ns", "name", "size", "target")

    def __init__(self, kind: int, mode: int, size: int, mtime_ns: int, name: bytes, target: bytes) -> None:
        self.kind = kind
        self.mode = mode
        self.size = size
        self.mtime_ns = mtime_ns
        self.name = name
        self.target = target

    def pack(self) -> bytes:
        """Part of the payload of a DATA frame."""
        mtime_ns = min(max(self.mtime_ns, -LARGEST), LARGEST)  # a file system may know later dates
        fields = (self.kind, self.mode, self.size, mtime_ns, len(self.name), len(self.target))
        return INFO_FIELDS.pack(*fields) + self.name + self.target

    @classmethod
    def unpack_all(cls, payload: bytes) -> list[Info]:
        """Those that fill a payload. Raises Malformed."""
        found = []
        start = 0
        while start < len(payload):
            if start + INFO_FIELDS.size > len(payload):
                raise Malformed("a description ends early")
            kind, mode, size, mtime_ns, name_length, target_length = INFO_FIELDS.unpack_from(payload, start)
            start += INFO_FIELDS.size
            end = start + name_length
            name, target = payload[start:end], payload[end : end + target_length]
            start = end + target_length
            if start > len(payload) or not REGULAR <= kind <= OTHER or size > LARGEST:
                raise Malformed("a description that is none")
            found.append(cls(kind, mode, size, mtime_ns, name, target))
        return found


class ExecRequest:
    """One command as the guest sees it: everything is said, nothing is inherited."""

    __slots__ = (
        "argv",
        "cwd",
        "env",
        "has_stdin",
        "output_limit",
        "output_tail",
        "terminal",
        "timeout",
        "user",
    )

    def __init__(self, argv: list[bytes], cwd: bytes, env: list[tuple[bytes, bytes]]) -> None:
        self.argv = argv
        self.cwd = cwd
        self.env = env
        self.timeout = -1.0
        self.output_limit = -1
        # Of each stream, instead of the end of the command at the limit.
        self.output_tail = 0
        self.has_stdin = False
        # Empty for the guest's own.
        self.user = b""
        # Rows and columns; no rows are no terminal.
        self.terminal = (0, 0)

    def pack(self) -> bytes:
        """The payload of an EXEC frame."""
        fields = EXEC_FIELDS.pack(
            self.timeout,
            self.output_limit,
            self.output_tail,
            HAS_STDIN * self.has_stdin | HAS_USER * bool(self.user),
            *self.terminal,
            len(self.argv),
            len(self.env),
        )
        pairs = [string for pair in self.env for string in pair]
        user = [self.user] if self.user else []
        return fields + pack_strings([self.cwd, *user, *self.argv, *pairs])


class NamedRequest:
    """A command with an id. Its whole standard input comes along: who starts it may leave at once.

    `bond` says what the end of its connection means: the command's end, nothing, or nothing unless a FORGET
    came on it before.
    """

    __slots__ = ("bond", "command", "id", "stdin")

    def __init__(self, name: bytes, command: ExecRequest, stdin: bytes, bond: int) -> None:
        self.id = name
        self.command = command
        self.stdin = stdin
        self.bond = bond

    def pack(self) -> bytes:
        """The payload of a START frame."""
        fields = NAMED_FIELDS.pack(self.bond, len(self.id), len(self.stdin))
        return fields + self.id + self.stdin + self.command.pack()


class NamedInfo:
    """A named command as it is listed; `kept` bounds what is kept: of stdout from, to, of stderr from, to."""

    __slots__ = ("id", "kept", "running")

    def __init__(self, name: bytes, kept: tuple[int, ...], *, running: bool) -> None:
        self.id = name
        self.running = running
        self.kept = kept

    def pack(self) -> bytes:
        """Part of the payload of a DATA frame."""
        return NAMED_INFO_FIELDS.pack(self.running, *self.kept, len(self.id)) + self.id

    @classmethod
    def unpack_all(cls, payload: bytes) -> list[NamedInfo]:
        """Those that fill a payload. Raises Malformed."""
        found = []
        start = 0
        while start < len(payload):
            if start + NAMED_INFO_FIELDS.size > len(payload):
                raise Malformed("a named command ends early")
            running, *kept, length = NAMED_INFO_FIELDS.unpack_from(payload, start)
            start += NAMED_INFO_FIELDS.size + length
            name = payload[start - length : start]
            ordered = kept[0] <= kept[1] <= LARGEST and kept[2] <= kept[3] <= LARGEST
            if start > len(payload) or not ordered:
                raise Malformed("a named command that is none")
            found.append(cls(name, tuple(kept), running=bool(running)))
        return found
