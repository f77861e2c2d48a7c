"""The span of one command of the command line. Imports nothing of OpenTelemetry until one is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from sandboxd.telemetry.propagation import inherited
from sandboxd.telemetry.settings import carried, wanted

Ended = Callable[[int], None]


def unheard(code: int) -> None:
    """Takes an exit code where there is no span to tell."""


@contextlib.contextmanager
def traced(name: str) -> Iterator[Ended]:
    """A span for the length of the block where the OTEL_ variables want traces: the child of TRACEPARENT, the
    parent of what the daemon does for it. Call what is yielded with the exit code.

    Without one the daemon's spans are children of TRACEPARENT. Raises ConfigError for variables that mean
    nothing.
    """
    (parent, state), protocol = carried(), wanted().exported.get("traces")
    if protocol is None:
        token = inherited.set(parent)
        try:
            yield unheard
        finally:
            inherited.reset(token)
        return
    from sandboxd.telemetry.command_span import span

    with span(name, protocol, parent, state) as ended:
        yield ended
