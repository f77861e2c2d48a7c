"""Places that ended sandboxes left, for those that come: a directory with an overlay's own in it, and groups.

To make these anew for each sandbox, and to take them away, costs most after the end: the kernel looks for a
memory group through every file system that is mounted. Nothing in them is a sandbox's: it could see neither.
A place is left only where none of the sandbox's processes is in the groups and its memory is given back; else
all is removed.
"""

from __future__ import annotations

# So many are kept. Each is two directories and up to three groups.
MOST = 64


class Vacancies:
    """The names of those of one launcher, and the limits of who left them."""

    def __init__(self) -> None:
        self._free: dict[str, dict[str, float]] = {}
        self._expected = 0
        self._number = 0

    def next(self, limits: dict[str, float]) -> str:
        """One to take, of a sandbox with these limits if there is one; nothing where there is none at all."""
        for name in reversed(self._free):
            if self._free[name] == limits:
                return name
        return next(iter(self._free), "")

    def alike(self, name: str, limits: dict[str, float]) -> bool:
        """Whether the one that left it had these limits."""
        return self._free.get(name) == limits

    def take(self, name: str) -> None:
        """Nobody else takes it, if there is one of this name."""
        self._free.pop(name, None)

    def wanted(self) -> bool:
        """Whether another one is kept; then call `settled` for it later."""
        if len(self._free) + self._expected >= MOST:
            return False
        self._expected += 1
        return True

    def new_name(self) -> str:
        """All have the same length."""
        self._number += 1
        return f"{self._number:08x}"

    def settled(self, name: str, limits: dict[str, float] | None) -> None:
        """One that was wanted was left by a sandbox with these limits, or, with None, was not."""
        self._expected -= 1
        if limits is not None:
            self._free[name] = limits
