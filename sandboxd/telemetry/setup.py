"""Puts a daemon's telemetry together, and ends it: what is left is sent within a bound, whoever listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from sandboxd import __version__
from sandboxd.config import ConfigError
from sandboxd.telemetry import exporters, logs
from sandboxd.telemetry.calls import Calls, Durations
from sandboxd.telemetry.instruments import Instruments
from sandboxd.telemetry.lag import LOOP_LAG, measured
from sandboxd.telemetry.prometheus import serve
from sandboxd.telemetry.recorder import NONE, NOTHING, Attributes, recorder
from sandboxd.telemetry.settings import Wanted
from sandboxd.telemetry.snapshot import Numbers, Snapshot
from sandboxd.telemetry.spans import Span, Spans

logger = logging.getLogger(__name__)

SCOPE = InstrumentationScope("sandboxd", __version__)
# A daemon that ends waits so long for what is left to be sent.
FLUSH_SECONDS = 2.0


class Recording:
    """The recorder of a daemon; `calls` records those of its gRPC server."""

    def __init__(self, spans: Spans | None, durations: Durations | None) -> None:
        self.calls = Calls(spans, durations)
        self.instruments: Instruments | None = None
        self._spans = spans
        self._numbers: Callable[[], Numbers] = dict

    def watch(self, numbers: Callable[[], Numbers]) -> None:
        """Measures these pools from now on."""
        self._numbers = numbers

    def numbers(self) -> Numbers:
        """Of the pools that are watched; none before. Called by the event loop alone."""
        self.calls.flush()
        return self._numbers()

    def step(self, name: str, attributes: Attributes, parent: Span | None) -> AbstractContextManager[Any]:
        """As `Recorder.step`; so are the others."""
        return NOTHING if self._spans is None else self._spans.step(name, attributes, parent)

    def seconds(self, name: str, value: float, attributes: Attributes) -> None:
        if self.instruments is not None:
            self.instruments.seconds(name, value, attributes)

    def count(self, name: str, attributes: Attributes) -> None:
        if self.instruments is not None:
            self.instruments.count(name, attributes)


class _Ends:
    """What is to be ended with the telemetry: `flush` may wait for a collector, `cut` ends that."""

    def __init__(self) -> None:
        self._flush: list[Callable[[], object]] = []
        self._cut: list[Callable[[], object]] = []

    def add(self, flush: Callable[[], object], cut: Callable[[], object]) -> None:
        self._flush.append(flush)
        self._cut.append(cut)

    async def end(self) -> None:
        """Returns after FLUSH_SECONDS at the latest. Threads that still wait then end with the process."""
        threads = [threading.Thread(target=flush, daemon=True) for flush in self._flush]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(_join, threads, time.monotonic() + FLUSH_SECONDS)
        if any(thread.is_alive() for thread in threads):
            logger.warning(
                "telemetry: the collector took more than %g s; what is left is lost", FLUSH_SECONDS
            )
            for cut in self._cut:
                cut()


def _join(threads: list[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@contextlib.asynccontextmanager
async def recorded(wanted: Wanted) -> AsyncIterator[Recording]:
    """Records what is done in the block by the task that enters it, and by those that it begins.

    Raises ConfigError where the OTEL_ variables cannot be used, or the address for Prometheus.
    """
    ends, resource = _Ends(), _resource()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_seldom())
        try:
            try:
                recording = _recording(wanted, resource, ends)
                if protocol := wanted.exported.get("logs"):
                    stack.enter_context(_logged(protocol, resource, ends))
            except ValueError as error:
                raise ConfigError(
                    f"telemetry cannot be set up: {error}; correct the OTEL_ variables"
                ) from error
            recorder.set(recording)
            if recording.instruments is not None:
                loop = asyncio.get_running_loop()
                stack.enter_context(
                    measured(loop, lambda seconds: recording.seconds(LOOP_LAG, seconds, NONE))
                )
            try:
                yield recording
            finally:
                recording.calls.flush()
        finally:
            # Not by its token: the block may end in another context than it began in.
            recorder.set(None)
            await ends.end()


def _recording(wanted: Wanted, resource: Resource, ends: _Ends) -> Recording:
    durations = Durations() if "metrics" in wanted.exported or wanted.scraped else None
    recording = Recording(_spans(wanted, resource, ends), durations)
    if durations is not None:
        _measure(wanted, resource, recording, ends)
    return recording


def _resource() -> Resource:
    """Who this daemon is; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    own: Mapping[str, str | int] = {
        "service.name": "sandboxd",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    named = Resource.create()
    given = {key: value for key, value in named.attributes.items() if not _is_unnamed(key, value)}
    return Resource({**named.attributes, **own, **given}, named.schema_url)


def _is_unnamed(key: str, value: object) -> bool:
    return key == "service.name" and str(value).startswith("unknown_service")


def _spans(wanted: Wanted, resource: Resource, ends: _Ends) -> Spans | None:
    if (protocol := wanted.exported.get("traces")) is None:
        return None
    exporter = exporters.spans(protocol, resource, SCOPE)
    processor = BatchSpanProcessor(exporter)
    ends.add(processor.shutdown, exporter.shutdown)
    # It reads the sampler's variables.
    sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
    return Spans(sampler, processor)


def _measure(wanted: Wanted, resource: Resource, recording: Recording, ends: _Ends) -> None:
    """Makes the instruments, and whoever reads them."""
    readers: list[MetricReader] = []
    numbers = Snapshot(asyncio.get_running_loop(), recording.numbers)

    def complete(data: MetricsData | None) -> MetricsData:
        return completed(data, recording.calls.durations, resource)

    if protocol := wanted.exported.get("metrics"):
        exporter = exporters.metrics(protocol, complete)
        reader = PeriodicExportingMetricReader(exporter)
        readers.append(reader)
        ends.add(lambda: reader.shutdown(FLUSH_SECONDS * 1000), exporter.shutdown)
    if wanted.scraped:
        asked = InMemoryMetricReader()
        readers.append(asked)

        def scrape() -> MetricsData:
            numbers.forget()
            return complete(asked.get_metrics_data())

        where, end = serve(wanted.scraped, scrape)
        ends.add(end, lambda: None)
        logger.info("metrics for Prometheus at http://%s/metrics", where)
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    recording.instruments = Instruments(provider.get_meter(SCOPE.name, SCOPE.version), numbers)


def completed(data: MetricsData | None, durations: Durations | None, resource: Resource) -> MetricsData:
    """What the SDK's meters say, with the durations that they do not know."""
    own = () if durations is None else (durations.calls.metric(), durations.commands.metric())
    told = [metric for metric in own if metric.data.data_points]
    # One scope: the SDK's encoding takes two of one name for the same, and drops the first.
    for one in () if data is None else data.resource_metrics:
        for scope in one.scope_metrics:
            told += scope.metrics
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, told, "")], resource.schema_url)])


@contextlib.contextmanager
def _logged(protocol: str, resource: Resource, ends: _Ends) -> Iterator[None]:
    exporter = exporters.logs(protocol)
    provider = LoggerProvider(resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    ends.add(provider.shutdown, exporter.shutdown)
    handler = logs.Handler(provider)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@contextlib.contextmanager
def _seldom() -> Iterator[None]:
    """A collector that is away fills no log, and a queue that is full costs its callers no log line each."""
    seldom = logs.Seldom(time.monotonic)
    quiet = {"opentelemetry.sdk._shared_internal": logging.ERROR}
    levels = {name: logging.getLogger(name).level for name in quiet}
    handlers = list(logging.getLogger().handlers)
    for name, level in quiet.items():
        logging.getLogger(name).setLevel(level)
    for handler in handlers:
        handler.addFilter(seldom)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for handler in handlers:
            handler.removeFilter(seldom)
