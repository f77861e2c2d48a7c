"""What a run's processes share: how their threads wait, and how they are ended as a last resort."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rl import reaper

THREADS = {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "0"}
"""How the threads of a parallel loop wait for the next one: awake for about 0.1 ms, then asleep.

A pass of a small model is hundreds of short loops. Threads that sleep at once are woken by the kernel
hundreds of times, a quarter of a pass; threads that stay awake for long hold a core that generator or
trainer, whichever is the other, would compute on. See docs/log.md.
"""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """For the length of the block SIGTERM raises KeyboardInterrupt, so that what is open is closed. Does
    nothing in other threads than the main one, which alone may say what signals do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def descendants(pid: int) -> list[int]:
    """Processes started by `pid` and by those in turn, found in /proc; none where there is no /proc."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for process in reaper.processes():
        try:
            # The name stands in brackets and may hold anything; the parent is the second field after it.
            fields = (reaper.PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(process)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children[queue.pop()]
        found += below
        queue += below
    return found


def kill_descendants() -> None:
    """Kills all descendants but two that end by themselves once this process is gone and remove what the
    others leave: Python's own resource tracker named semaphores, the reaper the engine's directory.
    """
    for pid in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if reaper.TRACKER in command or os.fsencode(reaper.__file__) in command:
                continue
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            continue


@contextmanager
def ended_with_this(output: Path, scratch: Path) -> Iterator[None]:
    """Should this process die within the block, even by SIGKILL, so do all that write their standard output
    to the file `output`, and the directory `scratch` with what they left there. Begin it before they
    start. The file's inode counts, so it may be moved.
    """
    output.touch()
    status = output.stat()
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(status.st_dev), str(status.st_ino), str(scratch)],
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
