"""Whoever writes to an engine's log is found and killed, whatever becomes of other processes meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl import reaper

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begun", file=sys.stderr, flush=True)
child.wait()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


def writers(log: Path, proc: Path = reaper.PROC) -> list[int]:
    status = log.stat()
    return reaper.writers(status.st_dev, status.st_ino, proc)


def add(proc: Path, pid: int, output: Path, command: bytes = b"python\0") -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "fd/1").symlink_to(output)
    (proc / str(pid) / "cmdline").write_bytes(command)


def test_a_process_that_cannot_be_looked_at_hides_no_other(log: Path, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    add(proc, 10, log)
    for pid, output in enumerate((tmp_path / "gone", Path("x" * 300), proc / "13/fd/1", tmp_path), 11):
        add(proc, pid, output)
    (proc / "15").touch()  # no directory any more
    (proc / "16").mkdir()  # nothing in it any more
    add(proc, 17, log, b"python\0-c\0from multiprocessing.resource_tracker import main\0")
    add(proc, os.getpid(), log)
    add(proc, 4_194_000, log)
    (proc / "self").mkdir()
    assert sorted(writers(log, proc)) == [10, 4_194_000]


def test_no_processes_are_found_where_there_is_no_proc(log: Path, tmp_path: Path) -> None:
    assert writers(log, tmp_path / "proc") == []


def test_all_who_write_to_a_file_are_killed_and_what_they_started(log: Path) -> None:
    with (
        log.open("ab") as output,
        subprocess.Popen(
            [sys.executable, "-c", PARENT], stdout=output, stderr=subprocess.PIPE, text=True
        ) as parent,
    ):
        assert parent.stderr is not None
        assert parent.stderr.readline() == "begun\n"
        assert len(writers(log)) == 2
        status = log.stat()
        reaper.kill_writers(status.st_dev, status.st_ino)
        assert writers(log) == []
        assert parent.wait(20) == -signal.SIGKILL
