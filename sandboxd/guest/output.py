"""What is told of a command's output: all of it, what fits a limit, or its head and its tail."""

from __future__ import annotations


class Budget:
    """The bytes that both streams of a command together may still send; None is no limit.

    With a `tail` the command goes on past it, and so many of each stream's last bytes are kept.
    """

    __slots__ = ("left", "tail")

    def __init__(self, limit: int | None, tail: int) -> None:
        self.left = limit
        self.tail = tail


class Trimmer:
    """One stream on its way out; its offsets count what is dropped, too."""

    __slots__ = ("_budget", "_offset", "_tail")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._offset = 0
        self._tail = bytearray()

    def take(self, data: bytes) -> tuple[int, bytes, bool]:
        """The offset of `data`, the part of it to send, and whether the command has written too much."""
        offset = self._offset
        self._offset += len(data)
        if self._budget.left is None:
            return offset, data, False
        kept, rest = data[: self._budget.left], data[self._budget.left :]
        self._budget.left -= len(kept)
        if not self._budget.tail:
            return offset, kept, bool(rest)
        self._tail += rest
        del self._tail[: -self._budget.tail]
        return offset, kept, False

    def last(self) -> tuple[int, bytes]:
        """Offset and bytes of the tail, once no more comes; given once."""
        tail = bytes(self._tail)
        self._tail.clear()
        return self._offset - len(tail), tail
