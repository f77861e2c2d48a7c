"""Ends the processes that this one has started, as a last resort: they have had their chance to end well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rl import reaper


def descendants(pid: int) -> list[int]:
    """Processes started by `pid` and by those in turn, found in /proc; none where there is no /proc."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name stands in brackets and may hold anything; the parent is the second field after it.
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(entry.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children[queue.pop()]
        found += below
        queue += below
    return found


def kill_descendants() -> None:
    """Kills all descendants but Python's own resource tracker: that one ends by itself once this process
    is gone, and removes the named semaphores that would otherwise stay in shared memory.
    """
    for pid in descendants(os.getpid()):
        try:
            if reaper.TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            continue


@contextmanager
def ended_with_this(output: Path) -> Iterator[None]:
    """Should this process die within the block, even by SIGKILL, so do all that write their standard output
    to the file `output`. Begin it before they start. The file's inode counts, so it may be moved.
    """
    output.touch()
    status = output.stat()
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(status.st_dev), str(status.st_ino)],
        stdin=subprocess.PIPE,  # never written to: it closes when this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with watcher:
        try:
            yield
        finally:
            watcher.kill()


def kill_writers(output: Path) -> None:
    """Kills all processes but this one that write their standard output to the file `output`."""
    status = output.stat()
    reaper.kill_writers(status.st_dev, status.st_ino)


def end_at_once(code: int) -> NoReturn:
    """Kills all descendants and ends this process without running anything more of it."""
    kill_descendants()
    os._exit(code)
