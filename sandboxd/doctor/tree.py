"""A host's /proc and /sys, or a test's copy of the parts that matter."""

from __future__ import annotations

import os
from pathlib import Path

from sandboxd.doctor.facts import UNLIMITED


class Tree:
    """Files below `root`; paths are without a leading slash. Nothing here raises for what is not there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """The file's text; None when it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The first word as a number; `max` is UNLIMITED. None when there is no such number."""
        words = (self.text(path) or "").split()
        if words[:1] == ["max"]:
            return UNLIMITED
        return int(words[0]) if words and words[0].isdecimal() else None

    def names(self, path: str) -> list[str]:
        """What is in a directory; empty when it cannot be read."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    def has(self, path: str) -> bool:
        """Whether something of that name can be seen."""
        return os.access(self.root / path, os.F_OK)

    def may_write(self, path: str) -> bool:
        """Whether this user may write there."""
        return os.access(self.root / path, os.W_OK)
