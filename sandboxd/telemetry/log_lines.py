"""Lines of the daemon's log that say which trace they belong to."""

from __future__ import annotations

import logging

from sandboxd.fitting import one_line
from sandboxd.telemetry.recorder import current


class Formatter(logging.Formatter):
    """Ends each line that was logged in the midst of a span with ` trace_id=… span_id=…`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging calls it so
        """The line, before the traceback if there is one."""
        line, span = _indented(super().formatMessage(record)), current.get()
        if span is None:
            return line
        span.resolved()
        return f"{line} trace_id={span.trace_id.hex()} span_id={span.span_id.hex()}"


def _indented(message: str) -> str:
    """Further lines of a message cannot be taken for lines of the log, nor do they write on a terminal."""
    return "\n    ".join(one_line(line) for line in message.split("\n"))
