"""`sandboxd top` as a person uses it: on a pipe, on a terminal, ended by Ctrl-C."""

from __future__ import annotations

import asyncio
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

from sandboxd import errors
from sandboxd.run_digest import KEYS
from sandboxd.types import Share
from tests.sandboxd.conftest import daemon_process
from tests.sandboxd.page_kit import stream
from tests.sandboxd.test_cli import run
from tests.sandboxd.test_web_guard import page, settings

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


STEPS = [
    {"step": 1, "solve_rate/all": 0.25, "solve_rate/sums": 0.25, **dict.fromkeys(KEYS, 1.0)},
    {"step": 2, "solve_rate/all": 0.5, "solve_rate/words": 0.04, **dict.fromkeys(KEYS, 0.75)},
]


def write_steps(directory: Path) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in STEPS))
    return directory


@pytest.mark.anyio
async def test_it_says_what_the_page_says(tmp_path: Path) -> None:
    """One daemon, asked by both: the same rows under the same keys."""
    demo = write_steps(tmp_path / "demo")
    pools = {"python": {"backend": "fake", "warm": 2}, "bad": {"backend": "fake", "warm": 0, "setup": ["no"]}}
    (tmp_path / "other").mkdir()
    same = write_steps(tmp_path / "other" / "demo")
    config = settings(tmp_path, token=False, web_runs=[demo, same, same], pools=pools)
    async with asyncio.timeout(60), page(config) as (session, client), stream(session) as states:
        async with client.acquire("python", timeout=20, tenant="red", labels={"episode": "e [b]1"}):
            with pytest.raises(errors.StartFailed):
                await client.acquire("bad", timeout=20)
            assert await client.list_tenants() == {"python": [Share("red", 1, 1, 0, 0)]}
            assert await client.list_tenants("bad") == {}
            with pytest.raises(errors.PoolNotFound):
                await client.list_tenants("none")
            async for state in states:
                rows = state.rows
                there = rows["leases"] and rows["failures"] and rows["steps"]
                # Whoever has failed waits no more.
                if there and set(rows["tenants"]) == {"python/red"}:
                    break
            asked = ("top", "--once", "--address", client.address, "--run", demo, "--run", same)
            said = json.loads((await asyncio.to_thread(run, *asked, "--json")).stdout)
            lines = (await asyncio.to_thread(run, *asked)).stdout.decode()
    assert set(said) == {"time", "pools", "tenants", "leases", "failures", "runs"}
    assert (said["tenants"], said["failures"]) == (rows["tenants"], rows["failures"])
    ((name, lease),) = said["leases"].items()
    shown = rows["leases"][name]
    # The calendar is read anew by each, a while after the clock, and the client renews its lease.
    assert lease.pop("since") == pytest.approx(shown["since"], abs=10)
    lease.pop("expires")
    assert lease == {key: shown[key] for key in lease}
    # Both directories are called the same.
    first, second = f"{tmp_path.name}/demo", "other/demo"
    assert set(rows["runs"]) == set(said["runs"]) == {first, second}
    assert {row["run"] for row in rows["steps"].values()} == {first, second}
    told = rows["runs"][first]
    assert {key: said["runs"][first][key] for key in ("fault", "step", "families")} == {
        key: told[key] for key in ("fault", "step", "families")
    }
    assert set(said["runs"][first]["latest"]) == {*KEYS, "solve_rate/all", "solve_rate/words"}
    assert set(said["pools"]["python"]) == set(rows["pools"]["python"])
    for title, value in told["facts"]:
        assert f"{title.lower()} {value}" in lines
    assert f"run {first}  step 2  solved all 50 %  sums 25 %  words 4.0 %" in lines
    assert "python  tenant red  holds 1  callers waiting 0  for 0" in lines


def test_a_live_table_on_a_terminal(address: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "60"}
    demo = ("--run", str(write_steps(tmp_path / "demo")))
    with top(address, "--interval", "0.02", *demo, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"POOL" not in shown:
            shown += os.read(ours, 4096)
        run("pool", "set", "--address", address, "b", "--warm", "7")
        while b"7 of 7" not in shown:
            shown += os.read(ours, 4096)
        lease = [sys.executable, "-m", "sandboxd", "exec", "--address", address, "b", "--", "sleep", "60"]
        with subprocess.Popen(lease) as holder:
            for words in (b"LEASED", b"TENANT", b"Trainer waits", b"75 %", b"FAMILY"):
                while words not in shown:
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
        (["--run", "none"], 2, "--run none: no such directory; name a run's, as in runs/demo"),
        (["--pool", "none"], 1, "no pool 'none'; this daemon has: a, b, c"),
    ],
)
def test_bad_input_is_one_line(address: str, arguments: list[str], code: int, words: str) -> None:
    done = run("top", "--address", address, *arguments)
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, words in line) == (code, True), line
