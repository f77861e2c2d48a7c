"""A process that others wait for, before those that only work."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

# Where the kernel shares processors out by sessions (sched(7), autogroups), a nice value counts only within
# one; this is the session's own, and a share ten times that of a session nobody changed.
AUTOGROUP = Path("/proc/self/autogroup")
NICE = -10
# sched_setattr(2) on each machine, and its structure as far as its first version goes.
SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
NORMAL, RESET_ON_FORK = 0, 1
# The shortest that the kernel takes: who asks for less at a time is given it sooner.
SLICE_NANOSECONDS = 100_000


def come_first(autogroup: Path = AUTOGROUP) -> bool:
    """Has this thread be given a processor soon when it wants one, in short turns, and its session before
    others. Returns whether the session is.

    One answer of a daemon takes several turns of its loop, and beside a burst of starts each turn waits. What
    a daemon starts has sessions of its own, and comes no sooner. False where the process leads no session,
    for the others of a shell's are not meant; where it may not, which takes root; and where processors are
    shared out otherwise.
    """
    _take_short_turns()
    if os.getsid(0) != os.getpid():
        return False
    try:
        autogroup.write_text(str(NICE))
    except OSError:
        return False
    return True


def _take_short_turns() -> None:
    """Children do not inherit it. Kernels before 6.12 know of no such wish; then nothing changes."""
    number = SET_ATTRIBUTES.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wish = ATTRIBUTES.pack(ATTRIBUTES.size, NORMAL, RESET_ON_FORK, nice, 0, SLICE_NANOSECONDS, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, wish, 0)
