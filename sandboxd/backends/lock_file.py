"""A lock on a file that may be taken away: who waited for it may hold that of a file without a name."""

from __future__ import annotations

import os


def is_at(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether `path` names the file that is open as `fd`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))  # noqa: PTH116 - the launcher loads it
    except FileNotFoundError:
        return False
