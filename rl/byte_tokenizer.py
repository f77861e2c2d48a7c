"""A tokenizer without a vocabulary file, for generators that deal in text."""

from __future__ import annotations

import re
from collections.abc import Iterable


class ByteTokenizer:
    """One token a byte, and one for each ChatML mark: small, total, and exact both ways."""

    MARKS = ("<|im_start|>", "<|im_end|>")

    @property
    def end_of_turn(self) -> int:
        return 257

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            ids += [256 + self.MARKS.index(part)] if part in self.MARKS else list(part.encode())
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        pieces = [self.MARKS[i - 256].encode() if i >= 256 else bytes([i]) for i in ids]
        return b"".join(pieces).decode(errors="replace")
