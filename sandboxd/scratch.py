"""Temporary directories that go even when their maker was killed: the next who makes such takes them away."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# One that is younger may have no lock yet.
YOUNG_SECONDS = 60.0
# What a daemon that still ends has files in.
STATE = "state"


@contextlib.contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A directory for the length of the block, in `parent` or where temporary files lie.

    First removes those of this user and prefix that nobody holds. Raises OSError when there can be none.
    """
    for left in (parent or Path(tempfile.gettempdir())).glob(f"{glob.escape(prefix)}*"):
        _remove_left(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        held = _held(Path(name))
        try:
            yield Path(name)
        finally:
            if held is not None:
                os.close(held)


def _remove_left(directory: Path) -> None:
    try:
        found = directory.lstat()
    except OSError:
        return
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_SECONDS:
        return
    held = _held(directory)
    if held is None:
        return
    try:
        state = directory / STATE
        if not state.is_dir() or not any(state.iterdir()):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(held)


def _held(directory: Path) -> int | None:
    """A lock on the directory, which ends with this process at the latest; None when another has it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
