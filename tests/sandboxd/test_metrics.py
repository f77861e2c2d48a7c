"""The metrics of a daemon as Prometheus scrapes them; the dashboard and the alert rules that ask for them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sandboxd.client import Client
from sandboxd.config import ConfigError, load
from sandboxd.daemon import running
from sandboxd.errors import StartFailed
from sandboxd.telemetry.instruments import COUNTERS, HISTOGRAMS, OBSERVED
from sandboxd.telemetry.settings import Wanted, wanted

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD, ALERTS = DOCS / "operations" / "grafana.json", DOCS / "operations" / "alerts.yaml"
pytestmark = pytest.mark.anyio


async def scrape(address: str) -> list[Sample]:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as reply:
            return str(reply.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(get))
    return [sample for family in families for sample in family.samples]


def found(samples: list[Sample], name: str, **labels: str) -> list[float]:
    return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]


async def test_a_scrape_says_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pools = {
        "python": {"backend": "fake", "warm": 1, "size_limit": 7},
        "broken": {
            "backend": "fake",
            "warm": 0,
            "retry": {"attempts": 2, "pause_seconds": 0.001},
            "setup": ["false"],
        },
    }
    config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=pools)
    everywhere = Wanted({}, "127.0.0.1:0")
    async with running(config, telemetry=everywhere) as addresses, Client(addresses[0]) as client:
        (where,) = re.findall(r"metrics for Prometheus at http://(\S+)/metrics", caplog.text)
        async with client.acquire("python", timeout=20) as box:
            for code in (0, 0, 3):
                await box.exec(["sh", "-c", f"exit {code}"], output_limit=1000)
            await box.exec(["sleep", "9"], timeout=0.05)
            held = await scrape(where)
        with pytest.raises(StartFailed):
            await client.acquire("broken", timeout=20)
        samples = await scrape(where)
    assert found(
        held, "sandboxd_pool_sandboxes", sandboxd_pool="python", sandboxd_sandbox_state="active"
    ) == [1]
    assert found(samples, "sandboxd_pool_size_limit", sandboxd_pool="python") == [7]
    assert found(samples, "sandboxd_leases_granted_total", sandboxd_pool="python") == [1]
    assert found(
        samples, "sandboxd_leases_ended_total", sandboxd_lease_ending="released", sandboxd_pool="python"
    ) == [1]
    ended = "sandboxd_command_duration_seconds_count"
    assert found(samples, ended, sandboxd_pool="python", sandboxd_command_ending="EXITED") == [3]
    assert found(samples, ended, sandboxd_pool="python", sandboxd_command_ending="TIMED_OUT") == [1]
    calls = {"rpc_method": "sandboxd.v1.SandboxService/RunCommand", "rpc_response_status_code": "OK"}
    assert found(samples, "rpc_server_call_duration_seconds_count", **calls) == [3]
    assert found(samples, "rpc_server_call_duration_seconds_bucket", le="+Inf", **calls) == [3]
    failed = {"rpc_response_status_code": "FAILED_PRECONDITION", "error_type": "START_FAILED"}
    assert found(samples, "rpc_server_call_duration_seconds_count", **failed) == [1]
    assert found(
        samples,
        "sandboxd_acquire_wait_seconds_count",
        sandboxd_pool="broken",
        sandboxd_outcome="START_FAILED",
    ) == [1]
    assert found(
        samples, "sandboxd_start_attempt_failures_total", sandboxd_pool="broken", sandboxd_phase="setup"
    ) == [1]
    assert found(samples, "sandboxd_pool_state", sandboxd_pool="broken", sandboxd_pool_state="DEGRADED") == [
        1
    ]
    _names_are_known({sample.name for sample in samples})


def _names_are_known(scraped: set[str]) -> None:
    """Every metric that is asked for exists, and every instrument is asked for or documented."""
    asked = {
        name for expression in _expressions() for name in re.findall(r"\b(?:sandboxd|rpc)_\w+", expression)
    }
    labels = {name for expression in _expressions() for name in _labels(expression)}
    assert asked - labels - scraped == set()
    text = (DOCS / "telemetry.md").read_text()
    names = [
        *HISTOGRAMS,
        *COUNTERS,
        *(each.name for each in OBSERVED),
        "rpc.server.call.duration",
        "sandboxd.command.duration",
    ]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def _labels(expression: str) -> list[str]:
    inside = re.findall(r"\{([^}]*)\}|by \(([^)]*)\)", expression)
    return [name for pair in inside for part in pair for name in re.findall(r"\b(?:sandboxd|rpc)_\w+", part)]


def _expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = re.findall(r"^ +expr: (.+)$", ALERTS.read_text(), re.MULTILINE)
    assert len(asked) >= 10
    assert len(rules) >= 5
    return asked + rules


def test_alert_rules_are_valid() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule), rule.get("alert")


async def test_an_address_that_is_taken_is_one_line(tmp_path: Path) -> None:
    config = load(None, state_dir=tmp_path / "state", pools={"python": {"backend": "fake"}})
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics = '127.0.0.1:{port}': Address already in use; name"):
            async with running(config, telemetry=Wanted({}, f"127.0.0.1:{port}")):
                pass


@pytest.mark.parametrize("address", ["9464", "localhost", "localhost:http"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics = .*must be HOST:PORT"):
        load(None, metrics=address)


OTLP = "OTEL_EXPORTER_OTLP_"
EVERYTHING = dict.fromkeys(("traces", "metrics", "logs"), "grpc")


@pytest.mark.parametrize(
    ("environ", "exported"),
    [
        ({}, {}),
        ({f"{OTLP}ENDPOINT": "http://c:4317"}, EVERYTHING),
        ({f"{OTLP}ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, {}),
        ({f"{OTLP}TRACES_ENDPOINT": "http://c"}, {"traces": "grpc"}),
        (
            {f"{OTLP}ENDPOINT": "http://c", "OTEL_LOGS_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
            {"traces": "grpc"},
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", f"{OTLP}PROTOCOL": "http/protobuf"},
            {"metrics": "http/protobuf"},
        ),
        (
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                f"{OTLP}PROTOCOL": "http/protobuf",
                f"{OTLP}TRACES_PROTOCOL": "grpc",
            },
            {"traces": "grpc"},
        ),
    ],
)
def test_what_is_exported_is_as_the_environment_says(
    environ: dict[str, str], exported: dict[str, str]
) -> None:
    assert wanted(environ=environ).exported == exported


@pytest.mark.parametrize(
    "environ",
    [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_TRACES_EXPORTER": "otlp", f"{OTLP}PROTOCOL": "json"}],
)
def test_what_is_not_known_is_refused(environ: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        wanted(environ=environ)
