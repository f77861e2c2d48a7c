"""Who comes first where processors are short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxd.bench.processes import daemon_pid, launcher_pid
from sandboxd.child import child_daemon
from sandboxd.priority import AUTOGROUP, NICE, come_first

ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")
SHARED_BY_SESSION = AUTOGROUP.exists() and ENABLED.exists() and ENABLED.read_text() == "1\n"
may_come_first = pytest.mark.skipif(
    os.geteuid() != 0 or not SHARED_BY_SESSION, reason="needs root and a kernel that shares by session"
)
COME_FIRST = """
import subprocess
from pathlib import Path
from sandboxd.priority import come_first
print(come_first())
print(Path("/proc/self/autogroup").read_text().split()[-1])
told = subprocess.run(["cat", "/proc/self/autogroup"], start_new_session=True, capture_output=True)
print(told.stdout.decode().split()[-1])
"""


def run(program: str, *before: str, session: bool = True) -> list[str]:
    """The words that a Python program prints, in a session that it leads or in this one."""
    done = subprocess.run(
        [*before, sys.executable, "-c", program],
        start_new_session=session,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.decode().split()


@may_come_first
def test_who_leads_a_session_comes_first_and_what_it_starts_does_not() -> None:
    assert run(COME_FIRST) == ["True", str(NICE), "0"]


@may_come_first
def test_in_the_session_of_others_nothing_is_changed() -> None:
    # Not every session has a share of its own: for one as old as the machine the file is empty.
    before = AUTOGROUP.read_text()
    assert run("from sandboxd.priority import come_first; print(come_first())", session=False) == ["False"]
    assert AUTOGROUP.read_text() == before


def test_where_there_are_no_such_sessions_it_goes_on_as_it_is(tmp_path: Path) -> None:
    # A directory stands for a file that cannot be written, by root either.
    assert come_first(tmp_path) is False


@may_come_first
@pytest.mark.anyio
async def test_a_daemon_comes_before_its_sandboxes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with child_daemon(state):
        values = {}
        for name, pid in (("daemon", daemon_pid(state)), ("launcher", launcher_pid(state))):
            values[name] = Path(f"/proc/{pid}/autogroup").read_text().split()[-1]
    assert values == {"daemon": str(NICE), "launcher": "0"}


def test_who_measures_waits_for_nobody_where_it_may() -> None:
    told = run(
        """
import os
from sandboxd.priority import wait_for_no_other
print(wait_for_no_other(), os.sched_getscheduler(0) == os.SCHED_RR)
"""
    )
    assert told in (["True", "True"], ["False", "False"])
