"""A real Prometheus scrapes a daemon: every query of the dashboard has an answer, every alert rule works."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import grpc
import pytest

from sandboxd.client import Client
from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.errors import StartFailed
from sandboxd.telemetry.settings import Wanted

from .page_kit import free_port

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
DASHBOARD, ALERTS = (ROOT / "docs" / "operations" / name for name in ("grafana.json", "alerts.yaml"))
CASES = Path(__file__).with_name("alert_cases.yaml")
SETTINGS = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: sandboxd
    static_configs: [targets: ["{daemon}"]]
"""
POOLS = {
    "python": {"backend": "fake", "warm": 1},
    "broken": {"backend": "fake", "warm": 0, "setup": ["false"], "retry": {"attempts": 1}},
}
# Nothing here meets a fault of the daemon itself: that one series is not there.
FAULT = grpc.StatusCode.INTERNAL.name


def program(name: str) -> str:
    """Its path; skips the test without it. CI has it, where its packages can be had (.ci/run)."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} is installed: run `apt-get install prometheus`")
    return found


def test_each_alert_fires_for_what_it_is_for_and_for_nothing_else() -> None:
    done = subprocess.run(
        [program("promtool"), "test", "rules", CASES.name], cwd=CASES.parent, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()
    rules = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    for rule in rules:
        # Once where all is well, once where it is not.
        assert CASES.read_text().count(f"alertname: {rule}") >= 2, rule


@contextlib.asynccontextmanager
async def prometheus(folder: Path, daemon: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with its API; it ends with the block."""
    settings, port = folder / "prometheus.yaml", free_port()
    settings.write_text(SETTINGS.format(rules=ALERTS, daemon=daemon))
    command = [
        program("prometheus"),
        f"--config.file={settings}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with asyncio.timeout(30):
                while not await _is_ready(session):
                    assert process.returncode is None, (folder / "log").read_text()
                    await asyncio.sleep(0.05)
            yield session
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _is_ready(session: aiohttp.ClientSession) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get("/-/ready") as reply:
            return reply.status == 200
    return False


async def answer(session: aiohttp.ClientSession, query: str) -> list[object]:
    async with session.get("/api/v1/query", params={"query": query}) as reply:
        told = await reply.json()
    assert told["status"] == "success", (query, told)
    found: list[object] = told["data"]["result"]
    return found


async def answered(session: aiohttp.ClientSession, query: str) -> None:
    """Returns once the query has an answer: a scrape or two later."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while not await answer(session, query):
                await asyncio.sleep(0.05)
            return
    raise AssertionError(f"no answer to {query}")


def dashboard() -> Iterator[str]:
    """What its panels ask, for all pools, and what its list of pools asks."""
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$pool", ".*").replace("$__rate_interval", "1m")
    for variable in board["templating"]["list"]:
        if listed := re.fullmatch(r"label_values\((\w+), (\w+)\)", str(variable["query"])):
            yield f"count by ({listed[2]}) ({listed[1]}{{{listed[2]}!=''}})"


def selectors() -> set[str]:
    """The series that the alert rules look at, each as a query of its own."""
    rules = re.findall(r"^ +expr: (.+)$", ALERTS.read_text(), re.MULTILINE)
    found = {each for rule in rules for each in re.findall(r"\b(?:sandboxd|rpc)_\w+\{[^}]*\}", rule)}
    bare = {
        each for rule in rules for each in re.findall(r"\b(sandboxd_\w+(?:_total|_seconds))\b(?!\{)", rule)
    }
    return found | bare


async def test_every_query_has_an_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A metric, a label or a value that does not exist has none: its panel or alert would stay silent."""
    program("prometheus")
    caplog.set_level(logging.INFO)
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=POOLS)
    telemetry = Wanted({}, "127.0.0.1:0")
    async with asyncio.timeout(50), running(config, telemetry=telemetry) as addresses:
        (where,) = re.findall(r"metrics for Prometheus at http://(\S+)/metrics", caplog.text)
        async with Client(addresses[0]) as client, prometheus(tmp_path, where) as session:
            async with client.acquire("python", timeout=20) as box:
                await box.exec(["true"], output_limit=1000)
            with pytest.raises(StartFailed):
                await client.acquire("broken", timeout=20)
            for query in dashboard():
                await answered(session, query)
            looked_at = selectors()
            assert len(looked_at) >= 7
            for query in looked_at:
                # The state of a pool that is not so, or a loss that there was not, is told as 0.
                await answered(session, query.replace(f'"{FAULT}"', f'"{grpc.StatusCode.OK.name}"'))
            async with session.get("/api/v1/rules") as reply:
                rules = [rule for group in (await reply.json())["data"]["groups"] for rule in group["rules"]]
            assert {rule.get("lastError", "") for rule in rules} == {""}
            assert len(rules) >= 7
