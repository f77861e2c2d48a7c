"""An episode is one trace from its prompt to its reward, what the daemon does for it included."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.errors import ConfigError
from rl.otel import protocol as protocol_of
from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.telemetry.settings import wanted
from tests.sandboxd.otlp_kit import attributes, collector
from tests.source_tree import ROOT


def test_an_episode_is_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")

    async def play() -> None:
        async with collector() as collected:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collected.address)
            pools = {"python": {"backend": "fake", "warm": 0}}
            config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=pools)
            async with running(config, telemetry=wanted()) as addresses:
                done = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-m", "tests.rl.traced_episode", addresses[0]],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
            assert (done.stdout, done.stderr) == ("Scored(reward=1.0)\n", "")
            # Both have ended, and sent what was left.
            (episode,) = [span for span in collected.spans if span.name == "episode"]
            tree = collected.tree(int.from_bytes(episode.trace_id, "big"))
            assert tree == [
                *("episode", "  generate", "  acquire", "    AcquireSandbox", "      queue wait"),
                *("        start sandbox", "          start attempt", "            prepare"),
                *("            bring up", "  exec", "    RunCommand", "  generate", "  verify"),
                "  ReleaseSandbox",
            ]
            told = attributes(episode)
            assert (told["rl.episode.reward"], told["rl.episode.turns"]) == (1.0, 2)
            services = {resource["service.name"] for resource in collected.resources}
            assert services == {"sandboxd", "sandboxd-rl"}

    asyncio.run(play())


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, None),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "http/protobuf",
        ),
    ],
)
def test_spans_go_where_the_environment_says(environ: dict[str, str], protocol: str | None) -> None:
    assert protocol_of("traces", environ) == protocol


def test_an_exporter_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER = 'zipkin': must be one of otlp, none"):
        protocol_of("traces", {"OTEL_TRACES_EXPORTER": "Zipkin"})
