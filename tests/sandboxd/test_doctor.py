"""The doctor as a person and as the daemon uses it: output, exit codes, and pools that fit the host."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sandboxd import errors
from sandboxd.client import Client
from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.doctor.capacity import Share
from sandboxd.doctor.facts import Demand, Facts
from sandboxd.doctor.findings import Finding, Verdict
from sandboxd.doctor.probes import try_overlay
from sandboxd.doctor.reading import read_directory
from sandboxd.doctor.report import show
from tests.sandboxd import test_namespace_user as user

pytestmark = pytest.mark.anyio

home, python = user.home, user.python

KEYS = {"check", "title", "verdict", "current", "needed", "fix", "current_value", "needed_value"}
FILES = 160
FITTING = (FILES - 64) // 3


def doctor(*arguments: object, limits: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    prefix = ["prlimit", *limits] if limits else []
    command = [*prefix, sys.executable, "-m", "sandboxd", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def report(*arguments: object, limits: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    done = doctor("--json", *arguments, limits=limits)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_json_has_the_keys_that_stay(tmp_path: Path) -> None:
    code, said = report("--state-dir", tmp_path / "state", "--count", "8")
    assert set(said) == {"verdict", "pools", "findings"}
    (pool,) = said["pools"]
    assert (pool["pool"], pool["backend"], pool["size_limit"]) == ("python", "namespace", 8)
    assert {frozenset(finding) for finding in said["findings"]} == {frozenset(KEYS)}
    verdicts = {finding["verdict"] for finding in said["findings"]}
    assert verdicts <= {"ok", "warning", "failure", "unknown"}
    assert code == (1 if "failure" in verdicts else 0)
    assert list(tmp_path.iterdir()) == []


def test_the_plain_report_names_each_check_and_each_cure() -> None:
    code, said = report("--count", "8")
    done = doctor("--count", "8")
    assert done.returncode == code
    for finding in said["findings"]:
        assert finding["title"] in done.stdout
    assert "sandboxes are carried" in done.stdout.splitlines()[-1]


def test_a_terminal_gets_a_table() -> None:
    screen = io.StringIO()
    finding = Finding("x", "a check of [this]", Verdict.FAILURE, "[1]", "2", "do [that]")
    demand = Demand("p", "fake", 3)
    show(Console(file=screen, force_terminal=True, width=200), [finding], [demand], {"p": Share(3)})
    text = screen.getvalue()
    assert "NEEDED" in text
    assert "a check of [this]" in text
    assert "failure: a check of [this]: do [that]" in text
    assert "pool p (fake): 3 of 3 sandboxes are carried" in text


def test_an_ordinary_user_reads_it_all(python: str, home: Path) -> None:
    """Without the packages that only a report needs."""
    script = """
        from sandboxd.doctor.checks import examine
        from sandboxd.doctor.facts import Demand
        from sandboxd.doctor.probes import try_namespaces, try_overlay
        from sandboxd.doctor.reading import read, read_directory
        from dataclasses import replace
        state = try_overlay(read_directory("state_dir", Path(sys.argv[2])))
        facts = replace(read(directories=state), namespaces=try_namespaces())
        print(facts.root, facts.own_tasks)
        for finding in examine(facts, [Demand("p", "namespace", 4)]):
            print(finding.check, finding.verdict)
    """
    head, *lines = user.as_user(python, home, script)
    assert head.startswith("False ")
    verdicts = dict(line.split() for line in lines)
    assert verdicts["can_unshare"] in ("ok", "failure")
    assert verdicts["overlay_state_dir"] in ("ok", "failure")
    assert "unknown" not in {verdicts["open_files"], verdicts["processes"], verdicts["pid_max"]}


def test_a_low_limit_is_a_failure_with_its_cure() -> None:
    code, said = report("--count", "960", limits=("--nofile=1024:1024",))
    (finding,) = [each for each in said["findings"] if each["check"] == "open_files"]
    assert (code, said["verdict"], finding["verdict"]) == (1, "failure", "failure")
    assert (finding["current_value"], finding["needed_value"]) == (1024, 64 + 3 * 960)
    assert "ulimit -Hn 2944" in finding["fix"]
    assert said["pools"][0]["carried"] == (1024 - 64) // 3
    assert said["pools"][0]["bound_by"] == "open_files"


def test_the_pools_of_a_settings_file_are_what_is_needed(tmp_path: Path) -> None:
    config = tmp_path / "sandboxd.toml"
    config.write_text('[pools.a]\nsize_limit = 100\n[pools.b]\nbackend = "fake"\nsize_limit = 10\n')
    _, said = report("--config", config, "--state-dir", tmp_path / "state")
    assert [(pool["pool"], pool["size_limit"]) for pool in said["pools"]] == [("a", 100), ("b", 10)]
    (finding,) = [each for each in said["findings"] if each["check"] == "open_files"]
    assert finding["needed_value"] == 64 + 3 * 100 + 6 * 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--config", "none.toml"], "cannot read the settings file none.toml"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], words: str) -> None:
    done = doctor(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_settings_and_a_count_do_not_go_together(tmp_path: Path) -> None:
    config = tmp_path / "sandboxd.toml"
    config.write_text("[pools.a]\n")
    done = doctor("--config", config, "--count", "3")
    assert (done.returncode, "leave out --count" in done.stderr) == (2, True)


def test_a_file_system_that_takes_no_overlay_is_told(tmp_path: Path) -> None:
    nowhere = try_overlay(read_directory("state_dir", Path("/proc/self")))
    assert nowhere[0].overlay is None
    odd = tmp_path / "a,b"
    odd.mkdir()
    state, images = try_overlay(read_directory("state_dir", tmp_path), read_directory("images_dir", odd))
    assert images.overlay is None
    assert state.overlay is not None
    assert [path.name for path in tmp_path.iterdir()] == ["a,b"]


@contextlib.asynccontextmanager
async def limited_daemon(tmp_path: Path, *limits: str) -> AsyncIterator[tuple[str, Path]]:
    """The address and the log of a daemon in a process with such limits."""
    config, log = tmp_path / "sandboxd.toml", tmp_path / "log"
    config.write_text("[pools.python]\nwarm = 0\nsize_limit = 960\nretry.attempts = 1\n")
    command = [sys.executable, "-m", "sandboxd", "serve", "--config", str(config)]
    with log.open("wb") as errors_file:
        process = await asyncio.create_subprocess_exec(
            *("prlimit", *limits, *command, "--state-dir", str(tmp_path / "state")),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors_file,
        )
    assert process.stdout
    line = (await process.stdout.readline()).decode()
    yield line.split(" serving ")[1].split(";")[0], log
    process.terminate()
    assert await process.wait() == 0


async def test_a_daemon_with_few_descriptors_says_so_and_serves_as_many_as_it_says(tmp_path: Path) -> None:
    async with limited_daemon(tmp_path, f"--nofile={FILES}:{FILES}") as (address, log):
        async with Client(address) as client, contextlib.AsyncExitStack() as stack:
            assert (await client.get_pool("python")).size_limit == FITTING
            boxes = await asyncio.gather(
                *(stack.enter_async_context(client.acquire("python", timeout=60)) for _ in range(FITTING))
            )
            # Two operations at once in every one of them.
            await asyncio.gather(*(box.write_file("/workspace/x", b"here") for box in boxes))
            ends = await asyncio.gather(
                *(box.exec(["sh", "-c", "cat x; echo"], timeout=30) for box in boxes for _ in range(2))
            )
            assert {(end.exit_code, end.stdout) for end in ends} == {(0, b"here\n")}
            with pytest.raises(errors.AcquireTimedOut):
                async with client.acquire("python", timeout=0.2):
                    pass
            assert (await client.update_pool("python", size_limit=500)).size_limit == FITTING
            assert (await client.get_pool("python")).start_failures_total == 0
        said = log.read_text()
    assert f"size_limit 960 is cut to {FITTING}: open files of the daemon (RLIMIT_NOFILE) is {FILES}" in said
    assert said.count("size_limit 960") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="what this user runs besides would count")
async def test_a_daemon_with_few_processes_serves_as_many_as_it_says(tmp_path: Path) -> None:
    """RLIMIT_NPROC binds the sandboxes of root, too: an idle one passes, its first command would not."""
    async with limited_daemon(tmp_path, "--nproc=1:240") as (address, _), Client(address) as client:
        fitting = (await client.get_pool("python")).size_limit
        assert fitting == (240 - 64) // 4
        async with contextlib.AsyncExitStack() as stack:
            boxes = [
                await stack.enter_async_context(client.acquire("python", timeout=60)) for _ in range(fitting)
            ]
            ends = await asyncio.gather(
                *(box.exec(["sh", "-c", "sleep 0; id -u"], timeout=30) for box in boxes)
            )
        assert {end.exit_code for end in ends} == {0}


async def test_pools_share_a_host_and_a_resize_takes_what_is_left(tmp_path: Path) -> None:
    pools = {name: {"backend": "fake", "warm": 0, "size_limit": size} for name, size in (("a", 4), ("b", 90))}
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=pools)
    host = Facts(open_files=64 + 6 * 20)
    async with running(config, host=host) as addresses, Client(addresses[0]) as client:
        assert {name: pool.size_limit for name, pool in (await client.list_pools()).items()} == {
            "a": 4,
            "b": 16,
        }
        assert (await client.update_pool("a", size_limit=10)).size_limit == 4
        assert (await client.update_pool("b", size_limit=5, warm=0)).size_limit == 5
        stats = await client.update_pool("a", size_limit=50, warm=50)
        assert (stats.size_limit, stats.warm_target) == (15, 15)
