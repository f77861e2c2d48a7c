"""`sandboxd top` as a person uses it: on a pipe, on a terminal, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxd.conftest import daemon_process
from tests.sandboxd.test_cli import run

POOLS = '[pools.a]\nbackend = "fake"\nwarm = 1\n[pools.b]\nbackend = "fake"\nwarm = 0\n'
POOLS += '[pools.c]\nbackend = "fake"\nwarm = 0\nsetup = ["false"]\n'


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with daemon_process(tmp_path, POOLS) as address:
        yield address


def top(address: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sandboxd", "top", "--address", address, *arguments]
    return subprocess.Popen(command, **options)


def ended(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(30)


def test_once(address: str) -> None:
    done = run("top", "--address", address, "--once")
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, len(lines)) == (0, 3)
    assert "  a  OK  warm " in lines[0]
    one = run("top", "--address", address, "--once", "--pool", "b").stdout.decode()
    assert "  b  OK  warm 0 of 0" in one


def test_a_line_for_each_change_until_ctrl_c(address: str) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with top(address, "--json", "--interval", "0.02", **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        assert list(first["pools"]) == ["a", "b", "c"]
        run("pool", "set", "--address", address, "b", "--warm", "3")
        while json.loads(process.stdout.readline())["pools"]["b"]["warm"] < 3:
            pass
        assert ended(process) == 0
        assert process.stderr.read() == b""


def test_a_live_table_on_a_terminal(address: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140"}
    with top(address, "--interval", "0.02", stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"POOL" not in shown:
            shown += os.read(ours, 4096)
        run("pool", "set", "--address", address, "b", "--warm", "7")
        while b"7 of 7" not in shown:
            shown += os.read(ours, 4096)
        lease = [sys.executable, "-m", "sandboxd", "exec", "--address", address, "b", "--", "sleep", "60"]
        with subprocess.Popen(lease) as holder:
            while b"LEASED" not in shown:
                shown += os.read(ours, 4096)
            holder.send_signal(signal.SIGINT)
        run("exec", "--address", address, "c", "--", "true")
        while b"setup" not in shown:
            shown += os.read(ours, 4096)
        assert ended(process) == 0
    os.close(ours)
    # It overwrites itself: the cursor goes up.
    assert b"\x1b[1A" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--interval", "0"], 2, "--interval 0: must be from 0.02 to 60 seconds"),
        (["--pool", "none"], 1, "no pool 'none'; this daemon has: a, b, c"),
    ],
)
def test_bad_input_is_one_line(address: str, arguments: list[str], code: int, words: str) -> None:
    done = run("top", "--address", address, *arguments)
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, words in line) == (code, True), line
