"""What can go wrong, as the caller must act on it. Imports nothing.

    SandboxdError
    ├── InvalidRequest        fix the call
    ├── NotFound              the name means nothing here
    │   ├── PoolNotFound
    │   ├── SandboxNotFound   never existed, or was released
    │   │   └── LeaseExpired  was yours until its time ran out
    │   ├── FileNotFound      no such path inside the sandbox
    │   └── CommandNotFound   no command of this id in the sandbox
    ├── CommandExists         the id is another command's: attach to that one, or take another
    ├── FileFailed            the sandbox refused the file operation (TASK)
    ├── QueueFull             too many callers wait already: come back after `retry_after`
    ├── PoolFull              the pool may have no more sandboxes: release some
    ├── AcquireTimedOut       no sandbox within the time the caller gave
    ├── StartFailed           every attempt to start a sandbox failed; `retryable` says if another may not
    ├── SandboxLost           the sandbox died: restart the episode, never retry the call
    ├── BackendUnavailable    Docker, the launcher or the daemon is not there: the call may be retried
    │   └── Draining          the daemon is shutting down
    └── Internal              a fault of the daemon itself

A command that fails is not an error: it ends with an `Exited` event. These classes speak of sandboxes.
`cause` says whose fault it was, and `mask` whether a training loop must leave the episode out.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class Phase(enum.StrEnum):
    """Where in a sandbox's life an error struck."""

    PULL = "pull"
    CREATE = "create"
    START = "start"
    READY = "ready"
    SETUP = "setup"
    QUEUE = "queue"
    EXEC = "exec"
    FILE = "file"
    RESET = "reset"
    DESTROY = "destroy"


class Cause(enum.StrEnum):
    """Whose fault an error is: the host's and ours, or the caller's."""

    INFRASTRUCTURE = "INFRASTRUCTURE"
    TASK = "TASK"


class SandboxdError(Exception):
    """Base of all errors of the service.

    `reason` is a name of the closed enum `ErrorReason` in the proto. `retry_after` is in seconds, or
    None where waiting does not help. `log` holds the last lines that a failed sandbox printed.
    """

    reason: ClassVar[str] = "INTERNAL"
    cause: ClassVar[Cause] = Cause.INFRASTRUCTURE
    default_phase: ClassVar[Phase | None] = None

    def __init__(
        self,
        message: str,
        *,
        phase: Phase | None = None,
        retry_after: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        if "\n" in message:  # Another program's words may have many lines, an error has one.
            message = " ".join(message.split())
        super().__init__(message)
        self.message = message
        self.phase = phase or self.default_phase
        self.retry_after = retry_after
        self.metadata = dict(metadata or {})

    @property
    def mask(self) -> bool:
        """True when an episode that met this error says nothing about the model."""
        return self.cause is Cause.INFRASTRUCTURE


class InvalidRequest(SandboxdError):
    """The call can never succeed as it stands."""

    reason = "INVALID_REQUEST"
    cause = Cause.TASK


class NotFound(SandboxdError):
    """The name means nothing to this daemon."""

    reason = "NOT_FOUND"


class PoolNotFound(NotFound):
    """No pool of this name is configured."""

    reason = "POOL_NOT_FOUND"
    cause = Cause.TASK


class SandboxNotFound(NotFound):
    """The sandbox never existed here, or was released."""

    reason = "SANDBOX_NOT_FOUND"


class LeaseExpired(SandboxNotFound):
    """The lease ran out before it was renewed, and the sandbox was destroyed."""

    reason = "LEASE_EXPIRED"


class FileNotFound(NotFound):
    """No such path inside the sandbox."""

    reason = "FILE_NOT_FOUND"
    cause = Cause.TASK
    default_phase = Phase.FILE


class CommandNotFound(NotFound):
    """No command of this id in the sandbox: there never was one, or it was forgotten."""

    reason = "COMMAND_NOT_FOUND"
    cause = Cause.TASK
    default_phase = Phase.EXEC

    @classmethod
    def named(cls, command_id: str) -> CommandNotFound:
        """For this id."""
        return cls(f"no command {command_id!r} in this sandbox: none was started, or it was forgotten")


class CommandExists(SandboxdError):
    """A command of the sandbox has this id already, running or ended."""

    reason = "COMMAND_EXISTS"
    cause = Cause.TASK
    default_phase = Phase.EXEC

    @classmethod
    def named(cls, command_id: str) -> CommandExists:
        """For this id."""
        return cls(
            f"command {command_id!r} exists in this sandbox: attach to it, forget it, or take another id"
        )


class FileFailed(SandboxdError):
    """The sandbox's file system refused the operation; the message names the errno."""

    reason = "FILE_FAILED"
    cause = Cause.TASK
    default_phase = Phase.FILE


class QueueFull(SandboxdError):
    """As many callers wait as the pool lets wait."""

    reason = "QUEUE_FULL"
    default_phase = Phase.QUEUE


class PoolFull(SandboxdError):
    """The pool's sandboxes are all leased or waited for, and what was asked for waits for none to end."""

    reason = "POOL_FULL"
    default_phase = Phase.QUEUE


class AcquireTimedOut(SandboxdError):
    """No sandbox became free within the time that the caller gave."""

    reason = "ACQUIRE_TIMED_OUT"
    default_phase = Phase.QUEUE


class StartFailed(SandboxdError):
    """A sandbox could not be started.

    `retryable` is False for what no repetition mends: an unknown image, a template that the host
    refuses. A message that ends a retried start names each attempt with its phase and cause.
    """

    reason = "START_FAILED"
    default_phase = Phase.START

    def __init__(
        self,
        message: str,
        *,
        phase: Phase | None = None,
        retryable: bool = True,
        retry_after: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        merged = {"retryable": str(retryable).lower(), **(metadata or {})}
        super().__init__(message, phase=phase, retry_after=retry_after, metadata=merged)
        self.retryable = merged["retryable"] == "true"


class SandboxLost(SandboxdError):
    """The sandbox died under its lease. It stays lost: no replacement takes its name.

    `with_backend` is True, in the daemon only, where what runs the sandboxes ended and all of them with it.
    """

    reason = "SANDBOX_LOST"
    default_phase = Phase.EXEC
    with_backend = False


class BackendUnavailable(SandboxdError):
    """What runs the sandboxes, or the daemon, cannot be reached; the call may be tried again."""

    reason = "BACKEND_UNAVAILABLE"

    @classmethod
    def ended_with_call(cls, command_id: str) -> BackendUnavailable:
        """For a command whose end nobody saw."""
        return cls(
            f"command {command_id!r} was ended with the call that ran it, whose connection broke",
            phase=Phase.EXEC,
        )


class Draining(BackendUnavailable):
    """The daemon is shutting down and takes no new work."""

    reason = "DRAINING"


class Internal(SandboxdError):
    """A fault of the daemon itself; its log has the traceback."""

    reason = "INTERNAL"
