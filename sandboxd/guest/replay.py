"""What is kept of a named command, so that a reader may come late, or again."""

from __future__ import annotations

from sandboxd.guest import wire

# Of each stream so many of the last bytes are kept.
LIMIT_BYTES = 1 << 20
# Of the commands of a sandbox that have ended so many are kept.
ENDED_LIMIT = 64


class Replay:
    """The last bytes of one stream at their true offsets; what its command's limits dropped is a hole."""

    __slots__ = ("_limit", "_pieces", "end", "held")

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._pieces: list[tuple[int, bytearray]] = []
        self.held = 0
        """Bytes that are kept."""
        self.end = 0
        """The offset after the newest of them."""

    @property
    def begin(self) -> int:
        """The offset of the oldest byte that is kept."""
        return self._pieces[0][0] if self._pieces else self.end

    def add(self, offset: int, data: bytes) -> None:
        """Keeps data that begins at `offset`, and drops the oldest bytes past the limit."""
        last = self._pieces[-1][1] if self._pieces else bytearray()
        if self._pieces and offset == self.end and len(last) + len(data) <= wire.PIECE:
            last += data
        else:
            self._pieces.append((offset, bytearray(data)))
        self.end = offset + len(data)
        self.held += len(data)
        while self.held > self._limit:
            self._drop(self.held - self._limit)

    def _drop(self, excess: int) -> None:
        """Drops the oldest piece, or what is too much of it."""
        offset, piece = self._pieces[0]
        if len(piece) <= excess:
            del self._pieces[0]
            self.held -= len(piece)
        else:
            del piece[:excess]
            self._pieces[0] = (offset + excess, piece)
            self.held -= excess

    def after(self, position: int) -> tuple[int, bytes] | None:
        """Offset and bytes of the oldest kept piece at or after `position`; None when there is none yet."""
        for offset, piece in self._pieces:
            if position < offset + len(piece):
                begin = max(position, offset)
                return begin, bytes(piece[begin - offset :])
        return None
