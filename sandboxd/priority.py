"""A process that others wait for, before those that only work."""

from __future__ import annotations

import os
from pathlib import Path

# Where the kernel shares processors out by sessions (sched(7), autogroups), a nice value counts only within
# one; this is the session's own, and a share ten times that of a session nobody changed.
AUTOGROUP = Path("/proc/self/autogroup")
NICE = -10


def come_first(autogroup: Path = AUTOGROUP) -> bool:
    """Has this process's session be given a processor before others. Returns whether it is.

    One answer of a daemon takes several turns of its loop, and beside a burst of starts each turn waits. What
    a daemon starts has sessions of its own, and comes no sooner. False where the process leads no session,
    for the others of a shell's are not meant; where it may not, which takes root; and where processors are
    shared out otherwise.
    """
    if os.getsid(0) != os.getpid():
        return False
    try:
        autogroup.write_text(str(NICE))
    except OSError:
        return False
    return True


def wait_for_no_other() -> bool:
    """Has this process run whenever it can, before all that have no such place (sched(7), SCHED_RR). Returns
    whether it does; that takes root.

    For what measures how long others take, and itself does next to nothing: its own waits would be counted as
    theirs.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:
        return False
    return True
