"""Where the daemon's parts say what they do, to whoever records it. Imports nothing of OpenTelemetry.

Tasks inherit the recorder of the daemon that began them, so that it need not be handed through every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

from sandboxd.errors import SandboxdError
from sandboxd.types import Exited

Value = str | int | float | bool
Attributes = Mapping[str, Value]

NONE: Attributes = {}
# Durations and counts that the parts tell of; `instruments` says what they mean.
START_DURATION = "sandboxd.start.duration"
ACQUIRE_WAIT = "sandboxd.acquire.wait"
ATTEMPT_FAILURES = "sandboxd.start.attempt.failures"
NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Recorder(Protocol):
    """Hears what is done. Nothing that it is told may wait or fail."""

    def step(self, name: str, attributes: Attributes, parent: Any) -> AbstractContextManager[object]:
        """A part of the work, for as long as the block runs, with the error that ends it."""
        ...

    def seconds(self, name: str, value: float, attributes: Attributes) -> None:
        """Something took so long."""
        ...

    def count(self, name: str, attributes: Attributes) -> None:
        """Something has happened once."""
        ...


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
"""That of the daemon that this task belongs to; None where nothing is recorded."""
current: ContextVar[Any] = ContextVar("current", default=None)
"""The span that this task works on, if any."""


def step(name: str, attributes: Attributes = NONE) -> AbstractContextManager[object]:
    """Records the block as a part of what this task works on."""
    told = recorder.get()
    return NOTHING if told is None else told.step(name, attributes, current.get())


def begun_by(cause: Any, name: str, attributes: Attributes = NONE) -> AbstractContextManager[object]:
    """Records the block as what `cause` began, or as a trace of its own: not as a part of what the task that
    happened to begin this one worked on.
    """
    told = recorder.get()
    return NOTHING if told is None else told.step(name, attributes, cause)


def annotate(attributes: Attributes) -> None:
    """Says more of what this task works on."""
    span = current.get()
    if span is not None:
        span.resolved().attributes.update(attributes)


def ran(sandbox: str, ended: Exited) -> None:
    """The call that this task serves ran a command, which ended so."""
    span = current.get()
    if span is not None:
        span.ran = sandbox, ended


def link(other: Any) -> None:
    """What this task works on has to do with another span, which may be None."""
    span = current.get()
    if span is not None and other is not None:
        span.resolved().links += (other,)


def timed(name: str, now: Callable[[], float], attributes: Attributes = NONE) -> AbstractContextManager[None]:
    """Records how long the block takes, and as `sandboxd.outcome` its error's reason, or `ok`."""
    told = recorder.get()
    return NOTHING if told is None else _timed(told, name, now, attributes)


@contextlib.contextmanager
def _timed(told: Recorder, name: str, now: Callable[[], float], attributes: Attributes) -> Iterator[None]:
    begun, outcome = now(), "ok"
    try:
        yield
    except SandboxdError as error:
        outcome = error.reason
        raise
    except BaseException:
        outcome = "CANCELLED"
        raise
    finally:
        told.seconds(name, now() - begun, {**attributes, "sandboxd.outcome": outcome})


def count(name: str, attributes: Attributes = NONE) -> None:
    """Records that something has happened."""
    told = recorder.get()
    if told is not None:
        told.count(name, attributes)
