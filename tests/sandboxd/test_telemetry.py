"""Traces, metrics and logs of a daemon, as a collector receives them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import TracerProvider

from sandboxd.client import Client
from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.errors import FileNotFound, StartFailed
from sandboxd.sync import SyncClient
from sandboxd.telemetry.settings import wanted
from sandboxd.v1 import sandbox_service_pb2 as pb

from .otlp_kit import Collector, attributes, collector

FAKE = {"backend": "fake", "warm": 0, "retry": {"attempts": 2, "pause_seconds": 0.001}}
pytestmark = pytest.mark.anyio
tracer = TracerProvider(shutdown_on_exit=False).get_tracer("tests")
Open = Callable[..., Any]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a daemon that sends at once."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_BLRP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    return monkeypatch


@pytest.fixture
def told(tmp_path: Path, quick: pytest.MonkeyPatch) -> Open:
    """`async with told(…) as (client, collected):` a daemon whose collector is the test's."""

    @contextlib.asynccontextmanager
    async def open_told(
        pool: dict[str, Any] | None = None, signals: str = "traces", **settings: Any
    ) -> AsyncIterator[tuple[Client, Collector]]:
        config = load(
            None,
            state_dir=tmp_path / "state",
            drain_seconds=0.2,
            pools={"python": {**FAKE, **(pool or {})}},
            **settings,
        )
        async with collector() as collected:
            for signal in signals.split():
                quick.setenv(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", collected.address)
            async with running(config, telemetry=wanted()) as addresses, Client(addresses[0]) as client:
                yield client, collected

    return open_told


@contextlib.contextmanager
def episode() -> Iterator[int]:
    """A caller's span; its trace id."""
    with tracer.start_as_current_span("episode") as span:
        yield span.get_span_context().trace_id


async def test_what_a_caller_does_is_one_trace(told: Open) -> None:
    async with told() as (client, collected):
        with episode() as ours:
            async with client.acquire("python", timeout=20) as box:
                await box.exec(["sh", "-c", "exit 3"], output_limit=1000)
                await box.exec(["true"])
                await box.write_file("note", b"abc")
                with pytest.raises(FileNotFound):
                    await box.read_file("missing")
        await collected.until(lambda: len(collected.trace(ours)) == 11)
        assert collected.tree(ours) == [
            *("AcquireSandbox", "  queue wait", "    start sandbox", "      start attempt"),
            *("        prepare", "        bring up"),
            *("RunCommand", "ExecCommand", "WriteFile", "ReadFile", "ReleaseSandbox"),
        ]
        acquire, run, write, read = (
            next(span for span in collected.trace(ours) if span.name == f"sandboxd.v1.SandboxService/{name}")
            for name in ("AcquireSandbox", "RunCommand", "WriteFile", "ReadFile")
        )
    sandbox = box.name.removeprefix("sandboxes/")
    assert attributes(acquire)["sandboxd.sandbox"] == sandbox
    assert attributes(run) == {
        "rpc.system.name": "grpc",
        "rpc.method": "sandboxd.v1.SandboxService/RunCommand",
        "rpc.response.status_code": "OK",
        "sandboxd.sandbox": sandbox,
        "sandboxd.command.ending": "EXITED",
        "process.exit.code": 3,
    }
    assert (attributes(write)["file.path"], attributes(write)["file.size"]) == ("note", 3)
    assert attributes(read)["error.type"] == "FILE_NOT_FOUND"
    assert read.status.code == Status.STATUS_CODE_UNSET, "a missing file is no failure of the server"


async def test_a_caller_that_leaves_is_told_of(told: Open) -> None:
    async with told() as (client, collected):
        with episode() as ours:
            async with client.acquire("python", timeout=20) as box:
                async for _ in box.stream(["sh", "-c", "echo; sleep 9"]):
                    break
        await collected.until(lambda: any(s.name.endswith("/ExecCommand") for s in collected.trace(ours)))
        (left,) = [span for span in collected.trace(ours) if span.name.endswith("/ExecCommand")]
    assert (attributes(left)["error.type"], left.status.code) == ("CANCELLED", Status.STATUS_CODE_UNSET)


async def test_a_start_that_fails_shows_each_attempt(told: Open) -> None:
    async with told({"quarantine_limit": 0}, faults=["fail start 1.0"], signals="traces metrics") as both:
        client, collected = both
        with episode() as ours:
            with pytest.raises(StartFailed):
                await client.acquire("python", timeout=20)
        await collected.until(lambda: any(s.name.endswith("/AcquireSandbox") for s in collected.trace(ours)))
        assert collected.tree(ours) == [
            *("AcquireSandbox", "  queue wait", "    start sandbox"),
            *("      start attempt", "        prepare", "        bring up", "      back off"),
            *("      start attempt", "        prepare", "        bring up"),
        ]
        failed = [span for span in collected.trace(ours) if span.status.code == Status.STATUS_CODE_ERROR]
        await collected.until(lambda: "sandboxd.start.attempt.failures" in collected.metrics)
        points = collected.metrics["sandboxd.start.attempt.failures"].sum.data_points
    assert [span.name.rpartition("/")[2] for span in failed] == [
        *("AcquireSandbox", "queue wait", "start sandbox"),
        *("start attempt", "bring up", "start attempt", "bring up"),
    ]
    told_of = attributes(failed[0])
    assert (told_of["error.type"], told_of["sandboxd.cause"]) == ("START_FAILED", "INFRASTRUCTURE")
    assert [attributes(span).get("sandboxd.attempt") for span in failed[3::2]] == [1, 2]
    assert [(attributes(point), point.as_int) for point in points] == [
        ({"sandboxd.pool": "python", "sandboxd.phase": "start"}, 2)
    ]


async def test_who_is_given_a_ready_sandbox_is_linked_to_its_start(told: Open) -> None:
    async with told({"warm": 1}) as (client, collected):
        await collected.until(lambda: any(span.name == "start sandbox" for span in collected.spans))
        (start,) = [span for span in collected.spans if span.name == "start sandbox"]
        with episode() as ours:
            async with client.acquire("python", timeout=20):
                pass
        await collected.until(lambda: any(s.name == "queue wait" for s in collected.trace(ours)))
        (queue,) = [span for span in collected.trace(ours) if span.name == "queue wait"]
    assert not start.parent_span_id, "nobody asked for it"
    assert [(link.trace_id, link.span_id) for link in queue.links] == [(start.trace_id, start.span_id)]


TRACE = "0af7651916cd43dd8448eb211c80319c"
MEANINGLESS = [
    "00-00000000000000000000000000000000-b7ad6b7169203331-01",
    f"00-{TRACE}-0000000000000000-01",
    f"00-{TRACE[:-2]} c-b7ad6b7169203331-01",
    f"00-{TRACE}-b7ad6b7169203331-zz",
    f"ff-{TRACE}-b7ad6b7169203331-01",
    "00",
]


async def test_the_callers_header_decides_whose_trace_it_is(told: Open) -> None:
    async with told() as (client, collected):

        async def call(header: str) -> None:
            await client.pools.ListPools(pb.ListPoolsRequest(), metadata=(("traceparent", header),))

        await call(f"00-{TRACE}-b7ad6b7169203331-00")  # not sampled, so nothing is told of it
        for header in MEANINGLESS:
            await call(header)
        await client.list_pools()
        await call(f"00-{TRACE}-b7ad6b7169203331-03")
        await collected.until(lambda: bool(collected.trace(int(TRACE, 16))))
        *own, last = collected.spans
    assert not trace.get_current_span().get_span_context().is_valid, "list_pools had no span to pass on"
    assert (last.trace_id.hex(), last.parent_span_id.hex()) == (TRACE, "b7ad6b7169203331")
    assert len({span.trace_id for span in own}) == len(MEANINGLESS) + 1
    assert not any(span.parent_span_id for span in own)


async def test_samplers_are_those_of_the_environment(told: Open, quick: pytest.MonkeyPatch) -> None:
    quick.setenv("OTEL_TRACES_SAMPLER", "always_on")
    async with told() as (client, collected):
        header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
        await client.pools.ListPools(pb.ListPoolsRequest(), metadata=(("traceparent", header),))
        await collected.until(lambda: len(collected.spans) > 0)
        assert collected.spans[0].trace_id.hex() == header[3:35]


async def test_the_blocking_client_passes_its_span_on(told: Open) -> None:
    async with told() as (client, collected):

        def call() -> int:
            with episode() as ours, SyncClient(client.address) as blocking:
                blocking.get_pool("python")
            return ours

        ours = await asyncio.to_thread(call)
        await collected.until(lambda: any(s.name.endswith("/GetPool") for s in collected.trace(ours)))


async def test_log_lines_carry_the_trace_they_belong_to(told: Open) -> None:
    async with told(faults=["fail start 1.0"], signals="traces logs") as (client, collected):
        with episode() as ours:
            with pytest.raises(StartFailed):
                await client.acquire("python", timeout=20)
        logging.getLogger("elsewhere").warning("outside")
        await collected.until(lambda: any(each.body.string_value == "outside" for each in collected.logs))
        inside = [each for each in collected.logs if each.trace_id.hex() == f"{ours:032x}"]
        (outside,) = [each for each in collected.logs if each.body.string_value == "outside"]
        # That of the line may end, and come, after others of its trace.
        of_lines = {each.span_id for each in inside}
        await collected.until(lambda: of_lines <= {span.span_id for span in collected.trace(ours)})
    assert [each.severity_text for each in inside] == ["ERROR"]
    assert outside.trace_id == b""


async def test_the_resource_is_that_of_the_environment(told: Open, quick: pytest.MonkeyPatch) -> None:
    quick.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=boxes,deployment.environment.name=lab")
    async with told() as (client, collected):
        await client.list_pools()
        await collected.until(lambda: len(collected.resources) > 0)
        resource = collected.resources[0]
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("boxes", "lab")
    assert resource["service.version"]
