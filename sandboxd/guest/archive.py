"""Tar archives, as trees travel: ustar headers, with pax records for what does not fit into one."""

from __future__ import annotations

BLOCK = 512
REGULAR, HARD_LINK, SYMLINK, DIRECTORY, FIFO = b"0", b"1", b"2", b"5", b"6"
END = bytes(2 * BLOCK)

# Kinds that are other names of a regular file: before ustar, and "contiguous".
OLD_REGULAR = (b"\0", b"7")
PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK = b"x", b"g", b"L", b"K"
EXTENSIONS = (PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK)
# The longest body of an extension; a path is at most 4096 bytes.
MAX_EXTENSION = 1 << 20

# Of a number in a pax record.
DIGITS = 20
NAME_BYTES = 100
OCTAL_LIMIT = 8**11
MAGIC = b"ustar\x0000"


class Malformed(ValueError):
    """What came is no tar archive."""


class Entry:
    """One thing in a tree. `name` is relative; `target` is where a link leads; `mtime` in whole seconds."""

    __slots__ = ("kind", "mode", "mtime", "name", "size", "target")

    def __init__(self, kind: bytes, name: bytes) -> None:
        self.kind = kind
        self.name = name
        self.target = b""
        self.mode = 0o644
        self.size = 0
        self.mtime = 0


def padding(size: int) -> int:
    """So many bytes follow a body of `size` bytes to fill its last block."""
    return -size % BLOCK


def header(entry: Entry) -> bytes:
    """The blocks that precede the entry's body."""
    records = b""
    if len(entry.name) > NAME_BYTES:
        records += _record(b"path", entry.name)
    if len(entry.target) > NAME_BYTES:
        records += _record(b"linkpath", entry.target)
    if entry.size >= OCTAL_LIMIT:
        records += _record(b"size", b"%d" % entry.size)
    if not records:
        return _block(entry)
    extension = Entry(PAX, b"./PaxHeader")
    extension.size = len(records)
    return _block(extension) + records + bytes(padding(len(records))) + _block(entry)


def _record(key: bytes, value: bytes) -> bytes:
    """`length key=value`, where the length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def _block(entry: Entry) -> bytes:
    size = entry.size if entry.size < OCTAL_LIMIT else 0
    mtime = min(max(entry.mtime, 0), OCTAL_LIMIT - 1)
    before = entry.name[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    before += b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (entry.mode & 0o7777, 0, 0, size, mtime)
    after = entry.kind + entry.target[:NAME_BYTES].ljust(NAME_BYTES, b"\0") + MAGIC
    after = after.ljust(BLOCK - len(before) - 8, b"\0")
    total = sum(before) + sum(after) + 8 * ord(" ")
    return before + b"%06o\0 " % total + after


def parse(block: bytes) -> Entry | None:
    """The entry of a header block; None for a block of zeros, which ends the archive. Raises Malformed."""
    if not any(block):
        return None
    if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise Malformed("a header with a wrong sum")
    entry = Entry(block[156:157], _text(block[:100]))
    entry.mode, entry.size, entry.mtime = (
        _number(block[a:b]) for a, b in ((100, 108), (124, 136), (136, 148))
    )
    entry.target = _text(block[157:257])
    prefix = _text(block[345:500]) if block[257:263] == MAGIC[:6] else b""
    if prefix:
        entry.name = prefix + b"/" + entry.name
    if entry.kind in OLD_REGULAR:
        entry.kind = DIRECTORY if entry.name.endswith(b"/") else REGULAR
    if entry.size < 0:
        raise Malformed("a header with a negative size")
    return entry


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    """Octal digits, or GNU's form for large numbers: the first bit set, then big-endian."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") - (0x80 << 8 * (len(field) - 1))
        return value if field[0] == 0x80 else value - (0x80 << 8 * (len(field) - 1))
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        raise Malformed("a header with a number that is none") from None


class Overrides:
    """What extensions say of the entry that follows them."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    def add(self, kind: bytes, body: bytes) -> None:
        """The body of an extension; global records, which name no file, are passed over. Raises Malformed."""
        if kind == GNU_NAME:
            self._values[b"path"] = body.rstrip(b"\0")
        elif kind == GNU_LINK:
            self._values[b"linkpath"] = body.rstrip(b"\0")
        elif kind == PAX:
            self._values.update(_records(body))

    def apply(self, entry: Entry) -> None:
        """Raises Malformed."""
        entry.name = self._values.get(b"path", entry.name)
        entry.target = self._values.get(b"linkpath", entry.target)
        size = self._values.get(b"size")
        if size is not None:
            entry.size = _decimal(size)
        if any(key.startswith(b"GNU.sparse.") for key in self._values):
            raise Malformed("a sparse file, whose parts would be taken for the whole")
        if b"\0" in entry.name + entry.target:
            raise Malformed("a name with a zero byte")
        self._values = {}


def _records(body: bytes) -> dict[bytes, bytes]:
    found = {}
    start = 0
    while start < len(body):
        space = body.find(b" ", start, start + DIGITS + 1)
        end = start + _decimal(body[start:space]) if space >= 0 else 0
        if not start <= space < end <= len(body):
            raise Malformed("a record with a wrong length")
        key, _, value = body[space + 1 : end - 1].partition(b"=")
        found[key] = value
        start = end
    return found


def _decimal(field: bytes) -> int:
    if not field.isdigit() or len(field) > DIGITS:
        raise Malformed("a record with a number that is none")
    return int(field)
