"""Kills an engine's processes as soon as the program that started them is gone, however it went.

    python -I -S rl/reaper.py DEVICE INODE SCRATCH        (started by rl.processes, never by hand)

A library's processes do not all notice that their parent was killed, and nobody but themselves could ask
the kernel to tell them. So this process waits beside them on a pipe from the parent. When the pipe closes
it kills every process whose standard output is the file (DEVICE, INODE), the engine's log: that is
inherited from the first instruction on, whereas names, environments and parents change. Last it removes
the directory SCRATCH, where they keep their sockets.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from pathlib import Path

TRACKER = b"multiprocessing.resource_tracker"
"""Python's own process that removes named semaphores from shared memory once all that use them are gone,
and then ends: killed with the rest it would leave them there."""
EXIT_SECONDS = 5.0
ROUNDS = 3
"""A process found in one round may have started another that is found in the next."""


def writers(device: int, inode: int) -> list[int]:
    """Processes whose standard output is this file, but for the calling one; none where there is no /proc."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            status = output.stat()
            tracker = TRACKER in (output.parents[1] / "cmdline").read_bytes()
            if (status.st_dev, status.st_ino) == (device, inode) and not tracker:
                found.append(int(output.parts[2]))
    return [pid for pid in found if pid != os.getpid()]


def kill(pids: list[int]) -> None:
    """Kills the processes and waits until they have ended, for at most EXIT_SECONDS each."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                os.kill(pid, signal.SIGKILL)
                select.select([handle], [], [], EXIT_SECONDS)
            finally:
                os.close(handle)


def kill_writers(device: int, inode: int) -> None:
    """Kills all processes whose standard output is this file, and those that they start meanwhile."""
    for _ in range(ROUNDS):
        kill(writers(device, inode))


if __name__ == "__main__":
    os.read(0, 1)
    kill_writers(int(sys.argv[1]), int(sys.argv[2]))
    shutil.rmtree(sys.argv[3], ignore_errors=True)
