"""The daemon's log as OTLP logs, each with the trace it belongs to."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.trace import NonRecordingSpan, set_span_in_context

from sandboxd.telemetry.recorder import current

# Whatever sends telemetry says in its own log that it cannot: telling that by telemetry would never end.
SENDERS = ("opentelemetry", "urllib3")
SEVERITIES = {
    logging.DEBUG: (SeverityNumber.DEBUG, "DEBUG"),
    logging.INFO: (SeverityNumber.INFO, "INFO"),
    logging.WARNING: (SeverityNumber.WARN, "WARN"),
    logging.ERROR: (SeverityNumber.ERROR, "ERROR"),
    logging.CRITICAL: (SeverityNumber.FATAL, "FATAL"),
}
SELDOM_SECONDS = 60.0


class Seldom:
    """A filter of a handler: what a collector that is away gives rise to is said once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """False for what the same place has said of late."""
        if not record.name.startswith(SENDERS):
            return True
        now = self._clock()
        if now - self._last.get(record.name, float("-inf")) < SELDOM_SECONDS:
            return False
        self._last[record.name] = now
        return True


class Handler(logging.Handler):
    """Passes log records on to the SDK."""

    def __init__(self, provider: LoggerProvider) -> None:
        super().__init__()
        self._provider = provider

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits: the SDK sends in batches, in a thread of its own."""
        if record.name.startswith(SENDERS):
            return
        span = current.get()
        level = max((each for each in SEVERITIES if each <= record.levelno), default=logging.DEBUG)
        number, text = SEVERITIES[level]
        told = LogRecord(
            timestamp=int(record.created * 1e9),
            context=None if span is None else set_span_in_context(NonRecordingSpan(span.whole())),
            severity_number=number,
            severity_text=text,
            body=record.getMessage(),
            attributes=_attributes(record),
        )
        self._provider.get_logger(record.name).emit(told)


def _attributes(record: logging.LogRecord) -> dict[str, Any]:
    told: dict[str, Any] = {"code.file.path": record.pathname, "code.line.number": record.lineno}
    if record.exc_info and record.exc_info[0] is not None:
        told["exception.type"] = record.exc_info[0].__name__
        told["exception.message"] = str(record.exc_info[1])
        told["exception.stacktrace"] = "".join(traceback.format_exception(*record.exc_info))
    return told
