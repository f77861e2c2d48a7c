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
import time
from pathlib import Path

TRACKER = b"multiprocessing.resource_tracker"
"""Python's own process that removes named semaphores from shared memory once all that use them are gone,
and then ends: killed with the rest it would leave them there."""
EXIT_SECONDS = 15.0
"""A killed process keeps its files open while its memory is freed, and meanwhile counts as a writer."""
PROC = Path("/proc")


def processes(proc: Path = PROC) -> list[int]:
    """All numbers of processes; none where there is no /proc."""
    try:
        return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]
    except FileNotFoundError:
        return []


def writers(device: int, inode: int, proc: Path = PROC) -> list[int]:
    """Processes whose standard output is this file, but for the calling one."""
    others = (pid for pid in processes(proc) if pid != os.getpid())
    return [pid for pid in others if _writes(pid, device, inode, proc)]


def _writes(pid: int, device: int, inode: int, proc: Path = PROC) -> bool:
    # One by one: whatever is wrong with a process, gone meanwhile or another user's, the rest are looked at.
    # A glob would end at the first that is gone between two steps of its path.
    with contextlib.suppress(OSError):
        status = (proc / str(pid) / "fd/1").stat()
        found = (status.st_dev, status.st_ino) == (device, inode)
        return found and TRACKER not in (proc / str(pid) / "cmdline").read_bytes()
    return False


def kill_writers(device: int, inode: int) -> None:
    """Kills all processes whose standard output is this file, and those that they start meanwhile. Returns
    once none is left, or after EXIT_SECONDS."""
    deadline = time.monotonic() + EXIT_SECONDS
    while time.monotonic() < deadline and (pids := writers(device, inode)):
        with contextlib.ExitStack() as held:
            for handle in [_killed(pid, device, inode, held) for pid in pids]:
                if handle is not None:
                    ended = select.poll()  # select() takes no descriptor above 1023
                    ended.register(handle, select.POLLIN)
                    ended.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _killed(pid: int, device: int, inode: int, held: contextlib.ExitStack) -> int | None:
    """Kills the process if it still is one of the writers, and not another that has got its number. Returns a
    descriptor that tells of its end; `held` closes it."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        held.callback(os.close, handle)
        if _writes(pid, device, inode):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return handle
    return None


if __name__ == "__main__":
    os.read(0, 1)
    kill_writers(int(sys.argv[1]), int(sys.argv[2]))
    shutil.rmtree(sys.argv[3], ignore_errors=True)
