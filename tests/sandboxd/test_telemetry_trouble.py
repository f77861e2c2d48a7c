"""A collector that is away, or that takes connections and says nothing, neither slows nor ends a daemon."""

from __future__ import annotations

import asyncio
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sandboxd.client import Client
from sandboxd.config import ConfigError, load
from sandboxd.daemon import running
from sandboxd.telemetry.settings import wanted

pytestmark = pytest.mark.anyio
FAKE = '[pools.python]\nbackend = "fake"\nwarm = 1\n'


@pytest.fixture
def endpoints() -> Iterator[dict[str, str]]:
    """Spans go where connections are taken and never read, the rest where nobody listens."""
    with socket.socket() as silent, socket.socket() as away:
        for one in (silent, away):
            one.bind(("127.0.0.1", 0))
        silent.listen(64)
        yield {
            f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT": f"http://127.0.0.1:{one.getsockname()[1]}"
            for signal, one in (("TRACES_", silent), ("", away))
        }


async def test_commands_run_and_the_daemon_ends(tmp_path: Path, endpoints: dict[str, str]) -> None:
    config, log = tmp_path / "sandboxd.toml", tmp_path / "log"
    config.write_text(FAKE)
    queue = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "8",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
    }
    command = [
        sys.executable,
        "-m",
        "sandboxd",
        "serve",
        "--config",
        config,
        "--state-dir",
        tmp_path / "state",
    ]
    with log.open("wb") as errors:
        process = await asyncio.to_thread(
            subprocess.Popen,
            [*map(str, command), "--metrics", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **queue, **endpoints},
        )
    assert process.stdout is not None
    with process, process.stdout:
        line = (await asyncio.to_thread(process.stdout.readline)).decode()
        async with Client(line.split(" serving ")[1].split(";")[0]) as client:
            async with asyncio.timeout(30), client.acquire("python") as box:
                # More than the queue holds: what finds it full is dropped, and says nothing.
                for _ in range(30):
                    assert (await box.exec(["true"], output_limit=1000)).ok
        process.send_signal(signal.SIGTERM)
        # Two seconds for what is left to be sent; the rest is this machine's.
        assert await asyncio.to_thread(process.wait, 30) == 0
    text = log.read_text()
    assert "Traceback" not in text
    assert "dropping" not in text
    assert "is left is lost" in text


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted."""

    kept: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.kept.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - as the library's
        """Says nothing."""


async def test_spans_go_by_http_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[str, bytes]] = []
    handler = type("Kept", (Receiver,), {"kept": kept})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{server.server_port}/v1/traces"
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        config = load(None, state_dir=tmp_path / "state", pools={"python": {"backend": "fake"}})
        async with running(config, telemetry=wanted()) as addresses, Client(addresses[0]) as client:
            await client.list_pools()
        # The end of the daemon has sent all that was left.
        server.shutdown()
        serving.join()
    (path, *_), sent = next(iter(kept)), [ExportTraceServiceRequest.FromString(body) for _, body in kept]
    names = [
        s.name for one in sent for of in one.resource_spans for scope in of.scope_spans for s in scope.spans
    ]
    assert path == "/v1/traces"
    assert "sandboxd.v1.PoolService/ListPools" in names


async def test_variables_that_mean_nothing_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    config = load(None, state_dir=tmp_path / "state", pools={"python": {"backend": "fake"}})
    with pytest.raises(ConfigError, match=r"telemetry cannot be set up: .*'soon'; correct the OTEL_"):
        async with running(config, telemetry=wanted()):
            pass


def test_a_daemon_without_telemetry_imports_none() -> None:
    script = "import sys, sandboxd.cli, sandboxd.daemon; print([m for m in sys.modules if 'opentelem' in m])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
