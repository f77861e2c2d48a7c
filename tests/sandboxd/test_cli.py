"""The command as a person uses it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import daemon_process

FAKE = '[pools.python]\nbackend = "fake"\nwarm = 1\n'


def run(*arguments: object, stdin: bytes = b"", timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "sandboxd", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=timeout)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with daemon_process(tmp_path, FAKE) as address:
        yield address


def test_exec_passes_output_and_says_how_it_ended(address: str) -> None:
    done = run(
        "exec", "--address", address, "python", "--", "sh", "-c", "cat; echo err >&2", stdin=b"\xff\0in"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\xff\0in", b"err\n")
    failed = run("exec", "--address", address, "python", "--", "sh", "-c", "exit 7")
    assert (failed.returncode, failed.stderr) == (1, b"sandboxd: the command ended with exit code 7\n")
    late = run("exec", "--address", address, "--timeout", "0.2", "python", "--", "sleep", "100")
    assert (late.returncode, late.stderr) == (1, b"sandboxd: the command was killed after 0.2 s\n")


def test_a_daemon_takes_all_the_open_files_that_it_may_and_says_where_its_page_is(tmp_path: Path) -> None:
    """A shell's usual limit of 1024 would end at the thousandth sandbox."""
    config = tmp_path / "sandboxd.toml"
    config.write_text(FAKE)
    command = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", tmp_path / "s"]
    shell = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", *map(str, command), "--web", "127.0.0.1:0"]
    with subprocess.Popen(shell, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline().decode()
        assert " serving " in said
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        # Port 0 is any: what is said is the one that was given.
        with urllib.request.urlopen(said.split("; page: ")[1].strip(), timeout=20) as page:
            assert page.status == 200
        process.terminate()
    assert soft == hard > 256


def test_listings_and_changes(address: str) -> None:
    assert b"python" in run("pool", "ls", "--address", address).stdout
    changed = run("pool", "set", "--address", address, "python", "--warm", "3")
    assert changed.stdout == b"python: 3 kept warm, at most 1024\n"
    pool = json.loads(run("pool", "ls", "--json", "--address", address).stdout)
    assert (pool["pool"], pool["warm_target"]) == ("python", 3)
    listed = run("ls", "--json", "--address", address).stdout.splitlines()
    assert {json.loads(line)["pool"] for line in listed} == {"python"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["exec", "--address", "unix:/none.sock", "python", "--", "true"], 2, "no daemon answers"),
        (["serve", "--listen", "nowhere"], 2, "listen = 'nowhere': an address is unix:/path or host:port"),
        (["serve", "--state-dir", "/proc/none"], 2, "state_dir /proc/none cannot be used"),
        (["serve", "--config", "none.toml"], 2, "cannot read the settings file none.toml"),
        (["pool", "set", "python"], 2, "name what to change"),
        (["bench", "burst", "--count", "0"], 2, "--count 0: must be at least 1"),
        (["bench", "burst", "--backend", "docker"], 2, "needs --image NAME"),
        (["bench", "starts", "--limits", "4,x"], 2, "'4,x': numbers from 1 to 1024"),
        (["bench", "exec", "--output-mb", "0"], 2, "--output-mb 0: must be at least 1"),
        (["bench", "churn", "--baseline", "docker-sdk"], 2, "--baseline-image NAME"),
        (["bench", "bombs", "--backend", "fake"], 2, "plain processes of this host"),
        (["bench", "bombs", "--bombs", "0"], 2, "--bombs 0: must be at least 1"),
        (["frobnicate"], 2, "invalid choice"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    if arguments[0] == "serve" and "--state-dir" not in arguments:
        config = tmp_path / "fake.toml"
        config.write_text(FAKE)
        extra = [] if "--config" in arguments else ["--config", str(config)]
        arguments = [*arguments, "--state-dir", str(tmp_path / "state"), *extra]
    done = run(*arguments)
    assert done.returncode == code
    last = done.stderr.decode().strip().splitlines()[-1]
    assert words in last
    assert b"Traceback" not in done.stderr


def test_a_port_in_use_is_named(tmp_path: Path, address: str) -> None:
    config = tmp_path / "fake.toml"
    config.write_text(FAKE)
    first = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", tmp_path / "a"]
    with subprocess.Popen([*map(str, first), "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        taken = process.stdout.readline().decode().split(" serving ")[1].split(";")[0]
        second = run("serve", "--config", config, "--state-dir", tmp_path / "b", "--listen", taken)
        assert second.returncode == 2
        words = f"sandboxd: listen = '{taken}': Address already in use; name another with --listen\n"
        assert second.stderr.decode() == words
        third = run("serve", "--config", config, "--state-dir", tmp_path / "a")
        assert third.returncode == 2
        assert f"in use by the daemon with pid {process.pid}" in third.stderr.decode()
        process.send_signal(signal.SIGTERM)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", small], check=True)
    try:
        done = run("serve", "--state-dir", small)
    finally:
        subprocess.run(["umount", small], check=True)
    assert done.returncode == 2
    assert f"state_dir {small} cannot be written: No space left on device" in done.stderr.decode()


def test_ctrl_c_ends_the_daemon_cleanly(tmp_path: Path) -> None:
    config = tmp_path / "fake.toml"
    config.write_text(FAKE)
    command = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", tmp_path / "a"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"Traceback" not in errors


def test_help_names_every_part() -> None:
    text = run("--help").stdout.decode()
    for part in ("serve", "exec", "ls", "pool", "bench", "doctor", "exit codes"):
        assert part in text


def test_bench_writes_the_keys_that_stay(tmp_path: Path) -> None:
    done = run("bench", "burst", "--count", "20", "--backend", "fake", "--json", timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    # It alone stands on standard output.
    result = json.loads(done.stdout)
    assert b"burst on fake: 20 of 20" in done.stderr
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_bytes(done.stdout)
    compared = run("bench", "compare", *files, "--json")
    (both,) = json.loads(compared.stdout)["compared"].values()
    assert [each["run"] for each in both] == ["a", "b"]
    assert {"target", "rate_per_s", "failed", "retries", "ready_s"} <= set(both[0])
    assert b"BURST OF 20" in compared.stderr
    assert {"shape", "backend", "count", "failed", "wall_s", "ready_s", "exec_s", "rate_per_s"} <= set(result)
    assert (result["count"], result["failed"], result["alive_after_hold"]) == (20, 0, 20)
    assert set(result["ready_s"]) == set(result["exec_s"]) == {"p50", "p90", "p99", "max"}
    assert result["leaked"] == {"processes": 0, "mounts": 0, "cgroups": 0, "containers": 0, "files": 0}
    assert result["baseline"] is result["idle"] is None
    assert set(result["health_s"]) == {"p50", "p90", "p99", "max"}
    assert result["health"]["failed"] == 0 < result["health"]["asked"]
    assert set(result["health"]["late_s"]) == set(result["health_s"])


def test_a_sandbox_that_does_nothing_costs_next_to_nothing(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    held = ("--count", "6", "--hold", "1", "--backend", "namespace")
    done = run("bench", "burst", *held, "--json", out, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["alive_after_hold"] == 6
    idle = result["idle"]
    # A timer may be a millisecond early.
    assert (idle["sandboxes"], idle["seconds"] > 0.9) == (6, True)
    assert 0 < idle["pss_bytes"] <= idle["most_pss_bytes"] < 2e6
    assert 0 <= idle["cpu_share"] <= idle["most_cpu_share"] < 0.01
    assert b"a sandbox that does nothing: 0." in done.stdout


@pytest.mark.parametrize("backend", ["fake", "namespace"])
def test_a_short_soak_finds_nothing_that_grows(tmp_path: Path, backend: str) -> None:
    out = tmp_path / "bench.json"
    few = ("--cycles", "240", "--callers", "4")
    done = run("bench", "soak", "--backend", backend, *few, "--json", out, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["count"], result["failed"]) == (240, 0)
    soak = result["soak"]
    assert [look["cycles"] for look in soak["looks"]] == list(range(4, 241, 4))
    measured = {"daemon_rss_bytes", "daemon_fds", "daemon_threads", "p50_s", "p99_s"}
    launcher = {"launcher_rss_bytes", "launcher_fds"} if backend == "namespace" else set()
    assert set(soak["growth"]) == measured | launcher
    for growth in soak["growth"].values():
        assert set(growth) == {"per_1000_cycles", "bound", "added", "first", "last", "flat"}
    assert not any(result["leaked"].values())


def test_bench_starts_compares_fixed_limits_with_what_is_found_out(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    few = ("--count", "20", "--rounds", "2", "--limits", "1,4", "--backend", "fake")
    done = run("bench", "starts", *few, "--json", out, timeout=110)
    assert done.returncode == 0, done.stderr
    assert b"STARTING AT ONCE" in done.stdout
    starts = json.loads(out.read_text())["starts"]
    assert [len(rates) for rates in (*starts["fixed_per_s"].values(), starts["adaptive_per_s"])] == [2, 2, 2]
    assert starts["adaptive_of_best"] > 0


def test_bench_exec_measures_commands_and_output(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    few = ("--count", "12", "--concurrency", "3", "--streams", "2", "--output-mb", "3")
    done = run("bench", "exec", *few, "--json", out, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["shape"], result["count"], result["failed"]) == ("exec", 12, 0)
    assert set(result["exec_s"]) == set(result["exec_at_once_s"]) == {"p50", "p90", "p99", "max"}
    assert result["at_once"]["callers"] == 3
    assert result["output"]["bytes"] == 3_000_000
    assert result["output"]["one_mb_per_s"] > 0 < result["output"]["many_mb_per_s"]
    assert not any(result["leaked"].values())


def test_bombs_leave_their_neighbours_alone(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = run("bench", "bombs", "--count", "4", "--bombs", "6", "--seconds", "3", "--json", out, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["failed"], result["alive_after_hold"], result["bombs"]["count"]) == (0, 4, 6)
    assert result["exec_s"]["max"] > 0 < result["exec_beside_bombs_s"]["max"]
    assert not any(result["leaked"].values())


def test_bench_fork_tells_the_copy_from_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = run("bench", "fork", "--count", "3", "--rounds", "2", "--json", out, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["count"], result["failed"]) == (6, 0)
    fork = result["fork"]
    assert fork["beyond_copy_s_each"] == pytest.approx((fork["fork_s"] - fork["copy_s"]) / 3)
    assert not any(result["leaked"].values())


def test_chaos_ends_every_rollout_once_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    few = ("--count", "120", "--size", "48", "--held", "20", "--kills", "2", "--seed", "4")
    done = run("bench", "chaos", *few, "--json", out, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    chaos = result["chaos"]
    assert chaos["kills"] == {"launcher": 2, "daemon": 2, "client": 1}
    assert sum(chaos["outcomes"].values()) == 120
    assert chaos["outcomes"]["scored"] >= 12
    assert chaos["acquired"] == chaos["released"] + chaos["expired"] + chaos["lost"]
    assert not any(result["leaked"].values())


def test_bench_churn_counts_rounds_and_the_warm_level(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    few = ("--callers", "3", "--warm", "4", "--seconds", "1")
    done = run("bench", "churn", "--backend", "fake", *few, "--json", out, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["failed"] == 0 < result["count"]
    assert result["rate_per_s"] == pytest.approx(result["count"] / result["wall_s"])
    assert set(result["acquire_s"]) == set(result["release_s"]) == {"p50", "p90", "p99", "max"}
    assert result["warm_level"]["target"] == 4 >= result["warm_level"]["least"]
