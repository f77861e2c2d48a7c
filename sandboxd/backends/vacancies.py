"""Places that ended sandboxes left, for those that come: a directory with an overlay's own in it, and groups.

To make these anew for each sandbox, and to take them away, was a tenth of what starting and ending one costs,
most of it the kernel's for a control group of memory. Nothing in them is a sandbox's: it could see neither.
A place is left only where none of the sandbox's processes is in the groups and its memory is given back; else
all is removed.
"""

from __future__ import annotations

# So many are kept. Each is two directories and three groups, about as much memory as an idle sandbox.
MOST = 64


class Vacancies:
    """The names of those of one launcher, which makes them up."""

    def __init__(self) -> None:
        self._free: list[str] = []
        self._expected = 0
        self._number = 0

    def next(self) -> str:
        """What `take` takes; nothing where there is none."""
        return self._free[-1] if self._free else ""

    def take(self) -> None:
        """Nobody else takes the next one."""
        if self._free:
            self._free.pop()

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

    def settled(self, name: str, *, left: bool) -> None:
        """One that was wanted was left, or was not."""
        self._expected -= 1
        if left:
            self._free.append(name)
