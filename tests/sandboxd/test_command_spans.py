"""A command of the command line is a span: the child of TRACEPARENT, the parent of what the daemon does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.telemetry.propagation import given
from sandboxd.telemetry.settings import Wanted

from .otlp_kit import attributes, collector
from .page_kit import free_port

pytestmark = pytest.mark.anyio
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
IMPORTED = """
import sys
from sandboxd.cli import main
code = main(sys.argv[1:])
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
sys.exit(code)
"""


async def command(*arguments: str, code: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "TRACE"))}
    program = ["-c", code] if code else ["-m", "sandboxd"]
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *program, *arguments],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_spans_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    pools = {"python": {"backend": "fake", "warm": 1}}
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=pools)
    async with asyncio.timeout(60), collector() as told:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", told.address)
        async with running(config, telemetry=Wanted({"traces": "grpc"})) as (address, *_):
            there = ("--address", address)
            sent = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": told.address, "TRACEPARENT": TRACEPARENT}
            fails = ("exec", *there, "python", "--", "sh", "-c", "exit 3")
            assert (await command(*fails, **sent)).returncode == 1
            assert (await command("pool", "ls", *there, **sent)).returncode == 0
            unknown = await command("inspect", *there, "python-0", **sent)
            assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
            # Without telemetry of its own it still says whose it is.
            other = TRACEPARENT.replace(TRACE, TRACE[::-1])
            assert (await command("ls", *there, code=IMPORTED, TRACEPARENT=other)).returncode == 0
            assert (await command("ls", *there, code=IMPORTED)).returncode == 0
            # A trace that its beginner does not want is told of by nobody.
            dropped = {**sent, "TRACEPARENT": f"{TRACEPARENT[:-1]}0"}
            assert (await command("reload", *there, **dropped)).returncode == 1
    tree = told.tree(int(TRACE, 16))
    assert tree[:3] == ["sandboxd exec", "  AcquireSandbox", "    queue wait"]
    assert tree[-4:] == ["sandboxd pool ls", "  ListPools", "sandboxd inspect", "  InspectSandbox"]
    assert {"  ExecCommand", "  ReleaseSandbox"} <= set(tree)
    spans = {span.name: span for span in told.trace(int(TRACE, 16))}
    assert "sandboxd reload" not in spans
    assert spans["sandboxd exec"].parent_span_id.hex() == PARENT
    own = attributes(spans["sandboxd exec"])
    assert own.pop("process.pid") > 0
    assert own == {"process.executable.name": "sandboxd", "process.exit.code": 1, "error.type": "1"}
    assert attributes(spans["sandboxd pool ls"])["process.exit.code"] == 0
    assert attributes(spans["sandboxd inspect"])["error.type"] == "SANDBOX_NOT_FOUND"
    assert told.tree(int(TRACE[::-1], 16)) == ["ListSandboxes"]
    assert {resource["service.name"] for resource in told.resources} == {"sandboxd", "sandboxd-cli"}


async def test_a_collector_that_is_away_costs_two_seconds_and_a_line(tmp_path: Path) -> None:
    pools = {"python": {"backend": "fake", "warm": 0}}
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=pools)
    async with asyncio.timeout(60), running(config) as (address, *_):
        away = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
        done = await command("pool", "ls", "--json", "--address", address, **away)
        assert (done.returncode, done.stdout.count("\n")) == (0, 1)
        assert done.stderr == "sandboxd: the collector took no span within 2 s\n"
        wrong = await command("pool", "ls", "--address", address, OTEL_TRACES_EXPORTER="console")
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert wrong.stderr == "sandboxd: OTEL_TRACES_EXPORTER = 'console': must be one of otlp, none\n"


@pytest.mark.parametrize(
    "nothing",
    [
        "", "1", f"{TRACEPARENT} ", TRACEPARENT.upper(), f"ff{TRACEPARENT[2:]}",
        TRACEPARENT.replace(TRACE, "0" * 32), TRACEPARENT.replace(PARENT, "0" * 16),
        f"{TRACEPARENT}-1", f"{TRACEPARENT}\n",
    ],
)  # fmt: skip
def test_a_parent_that_means_nothing(nothing: str) -> None:
    assert given({"TRACEPARENT": TRACEPARENT}) == TRACEPARENT
    assert given({"TRACEPARENT": nothing}) is None
