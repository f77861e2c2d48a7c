"""The values that every layer of the daemon speaks of. Nothing here waits or does I/O.

All durations are in seconds, all sizes in bytes. What the kernel treats as bytes is bytes here: argv,
environment, paths, output.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, field

SANDBOX_PREFIX = "sandboxes/"
POOL_PREFIX = "pools/"
POOL_ID = re.compile(r"[a-z][a-z0-9-]{0,62}")
COMMAND_ID = POOL_ID


class Network(enum.StrEnum):
    """What a sandbox can reach: nothing but its own loopback, or everything the host can."""

    NONE = "none"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use. None leaves that resource without a limit of its own.

    `disk_bytes` bounds the writable layer where the backend can (`Capabilities` says whether); the namespace
    backend then keeps that layer in memory, where `memory_bytes` counts it, too.
    """

    memory_bytes: int | None = 512 << 20
    cpu_count: float | None = None
    pids: int | None = 256
    open_files: int | None = 1024
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """How to make one kind of sandbox.

    `image` is None for the host's own system directories (namespace backend), else what the backend
    calls an image; its environment comes before `env`. `setup` is run once in each new sandbox before it
    counts as ready; a non-zero exit fails the start. `env` is the environment of every command; nothing is
    inherited from the host. `users`: commands may name one. `branches` are copies of what sandboxes had
    written, the oldest first, that a new one begins with (`Backend.branch`).
    """

    name: str
    image: str | None = None
    env: dict[bytes, bytes] = field(default_factory=dict)
    cwd: bytes = b"/workspace"
    setup: tuple[bytes, ...] = ()
    limits: Limits = field(default_factory=Limits)
    network: Network = Network.NONE
    runtime: str | None = None
    start_timeout: float = 30.0
    pull_timeout: float = 600.0
    users: bool = False
    branches: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Equal for templates whose sandboxes are alike."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


class SandboxState(enum.Enum):
    """A sandbox's life. It only moves forward, for a reset gives it a new name and with that a new life.

    QUARANTINED: it failed, and is kept to be looked at.
    """

    STARTING = enum.auto()
    WARM = enum.auto()
    ACTIVE = enum.auto()
    RESETTING = enum.auto()
    QUARANTINED = enum.auto()
    DELETING = enum.auto()


@dataclass(frozen=True, slots=True)
class Command:
    """One program to run inside a sandbox.

    `cwd` and entries of `env` override the template's. `stdin` is written and then closed; an empty
    one is an immediate end of file. `timeout` counts from the start of the program; when it passes,
    the whole process tree is killed. `output_limit` bounds stdout and stderr together; past it, the
    command is killed and ends with OUTPUT_LIMIT_EXCEEDED; with an `output_tail` it runs on, and the last so
    many bytes of each stream come at the stream's end, at their offset. `terminal` is its size in rows and
    columns: the command then runs on one, stdout carries all that it shows, and its input's end types Ctrl-D.
    `interactive`: the caller of `exec` writes the input, so `stdin` is empty. `user` is who it runs as, the
    sandbox's own user when empty: a name of its /etc/passwd or a number, and perhaps a group behind a colon.

    `id` names it: its output is then kept, bounded, for whoever attaches to it, and waits for no reader; one
    that falls behind sees a hole between offsets. `detached`: it outlives the `exec` that started it.
    `resumable`: it outlives the daemon that dies in the midst of `exec`, where named commands are kept.
    """

    argv: tuple[bytes, ...]
    cwd: bytes | None = None
    env: dict[bytes, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    timeout: float | None = None
    output_limit: int | None = None
    output_tail: int = 0
    terminal: tuple[int, int] | None = None
    interactive: bool = False
    user: str = ""
    id: str = ""
    detached: bool = False
    resumable: bool = False


class ExitReason(enum.StrEnum):
    """Why a command ended. Each is data for the caller, never an error of the sandbox."""

    EXITED = "EXITED"
    SIGNALED = "SIGNALED"
    TIMED_OUT = "TIMED_OUT"
    OOM_KILLED = "OOM_KILLED"
    OUTPUT_LIMIT_EXCEEDED = "OUTPUT_LIMIT_EXCEEDED"
    NOT_STARTED = "NOT_STARTED"


@dataclass(frozen=True, slots=True)
class Started:
    """The program runs. First event of a command, and only one."""


@dataclass(frozen=True, slots=True)
class Stdout:
    """A piece of standard output; `offset` counts the stream's bytes before it, dropped ones included."""

    data: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Stderr:
    """A piece of standard error; `offset` counts the stream's bytes before it, dropped ones included."""

    data: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The command ended and all its output was sent. Last event, and only one.

    `exit_code` is meaningful for EXITED (and 127 or 126 for NOT_STARTED), `signal` for SIGNALED.
    `wall` and `cpu` are in seconds. `detail` says in words why a program was not started, or
    which limit it met; of one that failed by itself it begins with DISK_FULL where a disk is full by then.
    """

    reason: ExitReason
    exit_code: int = 0
    signal: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    detail: str = ""


Event = Started | Stdout | Stderr | Exited


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one stream: the offset of the oldest byte, and the one after the newest."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """A named command: whether it runs, and what is kept of its output."""

    id: str
    running: bool
    stdout: Kept
    stderr: Kept


class FileKind(enum.StrEnum):
    """What a path names. OTHER: a pipe, a socket or a device."""

    FILE = "FILE"
    DIRECTORY = "DIRECTORY"
    SYMLINK = "SYMLINK"
    OTHER = "OTHER"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is at a path, not followed if it is a symbolic link.

    `name` is the path's last part, `mode` its permission bits, `modified` in seconds since 1970, `target`
    where a link leads.
    """

    name: bytes
    kind: FileKind
    size: int
    mode: int
    modified: float
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class StartPhases:
    """How long each phase of a start took, in seconds; 0 of what a backend does not do, or not apart.

    `retry` is from the first attempt's begin to the last one's, and `attempts` counts both; the others are of
    the one that succeeded: `pull` prepares the image, `create` makes the sandbox, `start` its first process,
    `ready` ends when it answers, and `setup` runs the template's command.
    """

    attempts: int = 1
    retry: float = 0.0
    pull: float = 0.0
    create: float = 0.0
    start: float = 0.0
    ready: float = 0.0
    setup: float = 0.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend really enforces on this host, as its `doctor` lines and sandboxes report it."""

    isolation: str
    enforced_limits: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where a waiter stands: how many callers are served before it, and how many sandboxes they want.

    `expected_wait` is in seconds, until it has all it wants, at the rate at which waiting callers were served
    of late; None where too little was seen for a rate.
    """

    callers_ahead: int
    sandboxes_ahead: int
    expected_wait: float | None = None


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The pools that new settings have begun, ended or changed, by name."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = (("added", self.added), ("removed", self.removed), ("changed", self.changed))
        return "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names) or "no pool changed"


class PoolState(enum.StrEnum):
    """How a pool fares. DEGRADED: its last start failed for good. DRAINING: it takes no new work.
    UNAVAILABLE: its backend does not answer.
    """

    OK = "OK"
    DEGRADED = "DEGRADED"
    DRAINING = "DRAINING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Share:
    """What a tenant has of a pool at one moment: sandboxes that it holds, callers of it that wait, and the
    sandboxes that they want. The name is empty for leases that an earlier daemon granted.
    """

    tenant: str
    weight: int
    active: int
    waiting: int
    wanted: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of one pool at one moment, and its totals since the daemon started.

    `warm_target` is that of this moment. `start_seconds` is the median of recent starts, from the decision to
    ready; None before the first. `start_limit` is how many of all pools of the backend may be starting at
    once. At any moment: acquired = released + expired + lost + active.

    `state_reason` says why the state is not OK. `starts_per_second` counts the starts that succeeded of late.
    `next_free_seconds` is how long a call that comes now would wait, None where that is not known, and
    `oldest_wait_seconds` how long the one that waits longest has waited, None where none waits. Of the
    target so many are `announced`.
    """

    warm_target: int
    size_limit: int
    starting: int
    warm: int
    active: int
    waiting: int
    deleting: int
    acquired_total: int
    released_total: int
    expired_total: int
    lost_total: int
    started_total: int
    start_failures_total: int
    start_seconds: float | None
    last_failure: str = ""
    state: PoolState = PoolState.OK
    start_limit: int = 0
    state_reason: str = ""
    starts_per_second: float = 0.0
    next_free_seconds: float | None = None
    oldest_wait_seconds: float | None = None
    announced: int = 0
    quarantined: int = 0
    unhealthy_total: int = 0
    reused_total: int = 0
