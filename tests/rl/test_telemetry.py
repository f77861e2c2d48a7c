"""A run's numbers as OpenTelemetry metrics: free when off, sent to a collector where one is named."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from rl.errors import ConfigError
from rl.otel import protocol
from rl.telemetry import exported

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportMetricsServiceRequest]]]:
    """Its address, and what has come."""
    came: list[ExportMetricsServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            came.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        ({ENDPOINT: "http://c:4317"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, "grpc"),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, "grpc"),
        ({"OTEL_METRICS_EXPORTER": "none", ENDPOINT: "http://c"}, None),
        ({ENDPOINT: "http://c", "OTEL_SDK_DISABLED": "true"}, None),
        ({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
    ],
)
def test_the_standard_variables_say_whether_and_how(environ: dict[str, str], wanted: str | None) -> None:
    assert protocol("metrics", environ) == wanted


@pytest.mark.parametrize("name", ["OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"])
def test_a_value_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 'smoke': must be one of "):
        protocol("metrics", {ENDPOINT: "http://c", name: "smoke"})


def test_numbers_arrive_at_a_collector_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, came):
        monkeypatch.setenv(ENDPOINT, address)
        with exported("http/protobuf", "mine") as telemetry:
            telemetry.record({"perf/wait_time_ratio": 0.25, "time/step": 3.0, "train/loss": float("nan")})
            telemetry.record({"perf/wait_time_ratio": 0.5, "solve_rate/my.task:Repair": 1.0})
        (request,) = came
    (of_resource,) = request.resource_metrics
    names = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert names["service.name"] == "sandboxd-rl"
    assert names["service.instance.id"] == "mine"
    found = {metric.name: metric for scope in of_resource.scope_metrics for metric in scope.metrics}
    values = {name: metric.gauge.data_points[0].as_double for name, metric in found.items()}
    assert values == {"perf/wait_time_ratio": 0.5, "time/step": 3.0, "solve_rate/my.task_repair": 1.0}
    assert (found["time/step"].unit, found["perf/wait_time_ratio"].unit) == ("s", "1")


@pytest.mark.parametrize("by", ["grpc", "http/protobuf"])
@pytest.mark.filterwarnings("ignore")
def test_a_collector_that_is_away_costs_a_moment_at_the_end(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    began = time.monotonic()
    with exported(by, "mine", flush_seconds=0.1) as telemetry:
        telemetry.record({"time/step": 1.0})
    assert time.monotonic() - began < 15.0


def test_off_it_imports_nothing() -> None:
    code = (
        "import sys\nfrom rl.telemetry import exported\n"
        "with exported(None, 'x') as telemetry:\n    telemetry.record({'a': 1.0})\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
