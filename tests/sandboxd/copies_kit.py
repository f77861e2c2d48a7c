"""The processes that copy the files of sandboxes: found by what they have open, and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from sandboxd import Box

from .endings_kit import state_of

COPIED_FILES = 5000


async def fill(box: Box) -> None:
    """With so many files that whoever looks finds them being copied."""
    assert (await box.exec(["sh", "-c", f"seq {COPIED_FILES} | xargs touch"])).ok


def stopped_copies(sandbox: str) -> list[int]:
    """Stops the processes that copy the files of a sandbox: they go on when they are told to, or killed."""
    upper = f"/{sandbox.removeprefix('sandboxes/')}/upper"
    processes = [each for each in Path("/proc").iterdir() if each.name.isdigit()]
    found = [int(each.name) for each in processes if _has_open(each, upper)]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    # One that has ended before it could be stopped is not there.
    return [pid for pid in found if exists(pid)]


def _has_open(process: Path, end: str) -> bool:
    """Whether it is a launcher's, and has a file open whose path ends so."""
    with contextlib.suppress(OSError):
        if (process / "cmdline").read_bytes().startswith(b"sandboxd-launcher"):
            return any(str(fd.readlink()).endswith(end) for fd in (process / "fd").iterdir())
    return False


def exists(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return state_of(pid) not in ("", "Z")
