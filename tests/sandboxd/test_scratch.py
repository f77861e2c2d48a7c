"""Directories of programs that were killed are taken away, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from sandboxd.scratch import YOUNG_SECONDS, scratch_directory

HOLDER = """
import sys
from pathlib import Path
from sandboxd.scratch import scratch_directory
with scratch_directory("bench-", Path(sys.argv[1])) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def age(directory: Path) -> None:
    then = time.time() - 2 * YOUNG_SECONDS
    os.utime(directory, (then, then))


def test_it_is_there_for_the_block(tmp_path: Path) -> None:
    with scratch_directory("bench-", tmp_path) as directory:
        (directory / "a").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_that_of_a_killed_program_goes_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        theirs = Path(program.stdout.readline().strip())
        (theirs / "state").mkdir()
        age(theirs)
        with scratch_directory("bench-", tmp_path):
            assert theirs.is_dir()
        program.kill()
        program.wait(20)
    age(theirs)
    with scratch_directory("bench-", tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_what_is_young_or_used_or_of_another_name_stays(tmp_path: Path) -> None:
    young, used, other = (tmp_path / name for name in ("bench-young", "bench-used", "other"))
    for directory in (young, used, other):
        directory.mkdir()
    (used / "state").mkdir()
    (used / "state/lock").write_text("")
    age(used)
    age(other)
    with scratch_directory("bench-", tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"bench-young", "bench-used", "other"}
