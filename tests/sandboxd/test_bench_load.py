"""The bench as a load tester: its shapes on daemons of its own and on running ones, with faults and kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxd import cli
from sandboxd.bench import load, phases
from sandboxd.bench.plan import Plan, Visit
from sandboxd.bench.schema import Record
from sandboxd.client import Client
from sandboxd.replies import SandboxInfo

from .conftest import daemon_process

FAKE = """
[fake]
start_seconds = 0.02

[pools.small]
backend = "fake"
warm = 1
size_limit = 20

[pools.other]
backend = "fake"
warm = 0
"""
# Of a start of 0.02 s: a timer may be a little early.
LEAST = 0.015
END_SECONDS = 60.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that the tests leave as it was."""
    with daemon_process(tmp_path_factory.mktemp("daemon"), FAKE) as address:
        yield address


def bench(*arguments: object, json_file: Path | None = None) -> tuple[int, dict[str, Any]]:
    """In this process: the exit code, and what --json has written."""
    written = [] if json_file is None else ["--json", str(json_file)]
    code = cli.main(["bench", *map(str, arguments), *written])
    if json_file is None:
        return code, {}
    found: dict[str, Any] = json.loads(json_file.read_text())
    Record.model_validate(found)
    return code, found


def pools(address: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with Client(address) as client:
            return dict(await client.list_pools())

    return asyncio.run(ask())


async def _told_of_starts(address: str) -> list[SandboxInfo]:
    async with Client(address) as client, client.acquire("small", ttl=30, timeout=20) as box:
        listed = {each.name: each async for each in client.list_sandboxes("small")}
        async with box.fork(1) as forks:
            return [box.info, listed[box.info.name], forks[0].info]


def test_a_daemon_tells_how_long_each_phase_of_a_start_took(address: str) -> None:
    told, listed, fork = asyncio.run(_told_of_starts(address))
    assert (told.name, told.ttl, told.start) == (listed.name, listed.ttl, listed.start)
    assert told.start is not None
    assert told.start.start >= LEAST
    assert (told.start.attempts, told.start.retry, told.start.setup) == (1, 0.0, 0.0)
    assert told.expires is not None
    assert (told.ttl, told.expires > told.created) == (30.0, True)
    # It is not a start like others.
    assert fork.start is None


def test_a_burst_on_a_running_daemon_leaves_it_as_it_was(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    on = ("--address", address, "--pool", "small", "--clients", 2, "--warm", "--hold", 0.1)
    code, found = bench("burst", "--count", 12, *on, "--html", page, json_file=tmp_path / "a.json")
    out = capsys.readouterr().out
    assert code == 0, out
    assert (found["backend"], found["failed"]) == (f"small at {address}", 0)
    assert (found["alive_after_hold"], found["success_rate"], found["retries"]) == (12, 1.0, 0)
    assert found["leaked"] == {"leases": 0}
    assert pools(address)["small"].warm_target == 1
    assert pools(address)["small"].active == 0
    # All were warm: no part of their starts was waited for.
    waited = {name: times["mean"] for name, times in found["phases"].items()}
    assert waited["start"] == pytest.approx(0, abs=1e-6)
    # No two take the same time to the nanosecond: the curve has them all.
    ready = {seconds for _, seconds in found["curves"]["ready"]}
    assert sum(waited.values()) == pytest.approx(sum(ready) / 12)
    clients = found["clients"]
    assert clients["count"] == len(clients["cpu_shares"]) == 2
    assert clients["daemon_cpu_share"] is not None
    assert clients["verdict"] in out
    readings = found["readings"]
    assert readings["peak"]["active"] == 12 > readings["after"]["active"] == 0
    assert readings["before"]["daemon_rss_bytes"] > 1 << 20
    assert readings["before"]["host_pids"] > 1 < readings["before"]["host_fds"]
    assert found["ready_over_time"][-1][1] == 12
    assert "<svg" in page.read_text()

    assert cli.main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "x1.00" in capsys.readouterr().out


def test_a_burst_may_do_nothing_but_lease(address: str, tmp_path: Path) -> None:
    on = ("--address", address, "--pool", "small", "--warm", "--no-exec", "--hold", 0.1)
    code, found = bench("burst", "--count", 12, *on, json_file=tmp_path / "a.json")
    assert (code, found["failed"], found["success_rate"], found["no_exec"]) == (0, 0, 1.0, True)
    assert found["leaked"] == {"leases": 0}
    assert found["ready_s"] == found["acquire_s"]
    assert (found["exec_s"], found["alive_after_hold"]) == (None, None)
    assert found["ready_over_time"][-1][1] == 12


def test_a_burst_of_leases_has_a_pool_without_room_for_others(tmp_path: Path) -> None:
    few = ("--backend", "fake", "--count", 4, "--warm", "--no-exec")
    code, found = bench("burst", *few, json_file=tmp_path / "a.json")
    assert (code, found["failed"]) == (0, 0)
    # Nothing is started in place of what was leased.
    assert found["readings"]["peak"]["starting"] == 0
    assert found["readings"]["before"]["warm"] == 4


def test_a_ramp_says_what_was_offered_and_served(address: str, tmp_path: Path) -> None:
    on = ("--address", address, "--pool", "other")
    code, found = bench(
        *("ramp", "--from", 0, "--to", 40, "--seconds", 1.5, *on), json_file=tmp_path / "a.json"
    )
    assert (code, found["count"], found["failed"], found["leaked"]) == (0, 30, 0, {"leases": 0})
    windows = found["arrivals"]["windows"]
    assert sum(one["offered_per_s"] * 0.15 for one in windows) == pytest.approx(30)
    assert windows[0]["offered_per_s"] < windows[-1]["offered_per_s"]
    # From the moment at which each was to come.
    assert found["ready_s"]["p50"] >= found["acquire_s"]["p50"] >= LEAST
    assert found["phases"]["start"]["p50"] >= LEAST


def test_times_count_from_the_moment_at_which_a_visit_was_to_begin(address: str) -> None:
    """A load that began five seconds ago, by its word: nobody was served sooner than that, though the
    daemon serves each in no time."""
    due = (0.0, 0.5, 1.0)
    plan = Plan(address, "other", "late", due=due)
    command = [sys.executable, "-m", "sandboxd.bench.client_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(f"{plan.to_line()}\n")
        client.stdin.flush()
        assert json.loads(client.stdout.readline()) == {"connected": True}
        client.stdin.write(json.dumps({"begin": time.monotonic() - 5.0}) + "\n")
        client.stdin.flush()
        visits = [Visit(*row) for row in json.loads(client.stdout.readline())["visits"]]
    assert [visit.due for visit in visits] == list(due)
    assert all(visit.sent >= 5.0 for visit in visits)
    timed = load._timed(visits)
    for moment, ready, acquired, visit in zip(due, timed["ready"], timed["acquire"], visits, strict=True):
        assert ready > acquired >= 5.0 - moment
        assert sum(phases.of(visit).values()) == pytest.approx(ready)


def test_faults_are_retried_and_objectives_set_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("poisson", "--rate", 30, "--seconds", 1, "--warm", 0, "--backend", "fake")
    faults = ("--faults", "fail start 0.5, die 0.3", "--fault-seed", 1)
    terms = ("--slo", "failed<100%,failed=0,p99_ready<1us")
    code, found = bench(*few, *faults, *terms, json_file=tmp_path / "a.json")
    out = capsys.readouterr().out
    assert code == 1
    assert found["retries"] > 0 < found["failed"]
    assert [term["met"] for term in found["slo"]] == [True, False, False]
    assert "slo: failed=0 is missed: " in out
    assert "slo: p99_ready<1us is missed: " in out
    assert "failed<100%" not in out
    assert "SANDBOX_LOST: the sandbox died: a fault was asked for: die" in found["failures"]
    assert not any(found["leaked"].values())


def test_a_sweep_measures_each_size_on_a_daemon_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = bench("sweep", "3", "--targets", "fake", json_file=tmp_path / "a.json")
    assert code == 0
    steps = found["sweep"]
    assert [(step["shape"], step["count"], step["alive_after_hold"]) for step in steps] == [
        ("burst", 3, 3),
    ]
    assert not any(any(step["leaked"].values()) for step in steps)
    assert all(step["health"]["asked"] > 0 for step in steps)
    assert "AT ONCE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["burst", "--pool", "small"], "--pool small: goes with --address"),
        (["burst", "--clients", "0"], "--clients 0: must be from 1 to 64"),
        (["burst", "--hold", "-1"], "--hold -1: must be at least 0"),
        (["burst", "--faults", "melt 1"], "--faults: fault 'melt 1' begins with none of"),
        (["burst", "--no-exec", "--image", "i", "--baseline", "docker-sdk"], "--no-exec: the baseline runs"),
        (["burst", "--runtime", "runsc"], "--runtime runsc: only --backend docker has runtimes"),
        (["burst", "--slo", "p99_ready<2"], "argument --slo: 'p99_ready<2': a time needs a unit"),
        (["burst", "--json", "/none/a.json"], "--json /none/a.json: there is no directory /none"),
        (["poisson", "--rate", "0"], "a rate must be above 0"),
        (["poisson", "--rate", "0.001", "--backend", "fake"], "nobody comes in 10 s; raise the rate"),
        (["ramp", "--seconds", "0"], "--seconds 0: must be above 0"),
        (["sweep", "9,x"], "'9,x': numbers from 1 to 100000"),
        (["sweep", "--targets", "docker"], "'docker' in the targets needs --image NAME"),
        (["compare", "none.json"], "none.json cannot be read: No such file or directory"),
        (["churn", "--address", "unix:/none.sock"], "no daemon answers"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as usage:
        code = usage.code if isinstance(usage.code, int) else 1
    assert code == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["burst"], 2, "has the pools other, small: name one with --pool"),
        (["burst", "--pool", "none"], 1, "POOL_NOT_FOUND"),
        (
            ["burst", "--pool", "small", "--count", "21"],
            2,
            "may have 20 sandboxes, the load wants 21 at once",
        ),
        (["burst", "--pool", "small", "--faults", "die 1"], 2, "leave out --address"),
    ],
)
def test_what_a_running_daemon_cannot_do_is_one_clear_line(
    address: str, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments, "--address", address]) == code
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may have ended since.
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def is_client(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"sandboxd.bench.client_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def _clients_of(bench: subprocess.Popen[str]) -> list[int]:
    async with asyncio.timeout(END_SECONDS):
        while len(found := [pid for pid in children(bench.pid) if is_client(pid)]) < 1:
            await asyncio.sleep(0.05)
    return found


def clients_of(bench: subprocess.Popen[str]) -> list[int]:
    """Its client processes, once there is one."""
    return asyncio.run(_clients_of(bench))


@contextlib.contextmanager
def churn() -> Iterator[subprocess.Popen[str]]:
    """A bench that would go on for long."""
    command = [sys.executable, "-m", "sandboxd", "bench", "churn", "--backend", "fake", "--seconds", "300"]
    command += ["--callers", "4", "--warm", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


async def gone(pids: list[int]) -> None:
    async with asyncio.timeout(END_SECONDS):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)


def test_a_client_process_that_dies_ends_the_bench_with_one_line() -> None:
    with churn() as running:
        clients = clients_of(running)
        family = children(running.pid)
        os.kill(clients[0], signal.SIGKILL)
        _, error = running.communicate(timeout=60)
    assert (running.returncode, error) == (2, "sandboxd: a client process of the load ended with -9\n")
    asyncio.run(gone(family))


def test_a_bench_that_is_killed_takes_its_clients_and_its_daemon_with_it() -> None:
    with churn() as running:
        clients_of(running)
        family = children(running.pid)
        running.kill()
    asyncio.run(gone(family))
