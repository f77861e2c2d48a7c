"""Between the daemon's values and the messages of the proto: decoding checks, encoding cannot fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from google.protobuf import duration_pb2, timestamp_pb2

from sandboxd.errors import InvalidRequest
from sandboxd.leases import Lease
from sandboxd.queueing import DEFAULT_TENANT, PRIORITY_LIMIT, Claim
from sandboxd.sandbox import Sandbox
from sandboxd.types import (
    COMMAND_ID,
    POOL_ID,
    POOL_PREFIX,
    SANDBOX_PREFIX,
    Command,
    CommandInfo,
    Event,
    Exited,
    FileInfo,
    Kept,
    QueuePosition,
    SandboxState,
    Started,
    StartPhases,
    Stderr,
    Stdout,
)
from sandboxd.v1 import sandbox_service_pb2 as pb

STDIN_LIMIT_BYTES = 1 << 20
LONGEST_SECONDS = 1e7
LABEL_COUNT_LIMIT, LABEL_BYTES_LIMIT, REQUEST_ID_BYTES_LIMIT = 16, 256, 128
PAGE_SIZE_DEFAULT, PAGE_SIZE_LIMIT, PAGE_TOKEN_LIMIT = 100, 1000, 20
FILE_MODE_DEFAULT, FILE_MODE_LIMIT = 0o644, 0o7777
OUTPUT_PIECE_BYTES = 1 << 19
TERMINAL_SIDE_LIMIT = 65535
SIGNAL_LIMIT = 64
# Of users and groups: as many as a sandbox has.
ID_LIMIT, USER_BYTES_LIMIT = 65535, 256
TAIL_LIMIT_BYTES = 1 << 20
FORK_LIMIT = GANG_LIMIT = 1000
POSITION_INTERVAL_LEAST = 0.1
FILES_AT_ONCE, NAMES_AT_ONCE_BYTES = 1000, 1 << 19
# What a timestamp can say, in seconds since 1970: the years 1 to 9999.
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
RUN_OUTPUT_LIMIT_BYTES = 1 << 20

# Says nothing more, so one does for all; who is given it leaves it as it is.
STARTED = pb.ExecCommandResponse(started=pb.CommandStarted())

Entry = TypeVar("Entry")


def identifier(name: str, prefix: str) -> str:
    """The part of a resource name after its collection."""
    if not name.startswith(prefix) or not name[len(prefix) :] or "/" in name[len(prefix) :]:
        raise InvalidRequest(f"resource name {name!r} must look like {prefix}NAME")
    return name[len(prefix) :]


def seconds(value: duration_pb2.Duration, field: str) -> float:
    """A positive duration in seconds."""
    result: float = value.seconds + value.nanos / 1e9
    if not 0 < result <= LONGEST_SECONDS:
        raise InvalidRequest(f"{field} = {result:g} s must be above 0 and at most {LONGEST_SECONDS:g} s")
    return result


def labels(value: Mapping[str, str]) -> dict[str, str]:
    if len(value) > LABEL_COUNT_LIMIT:
        raise InvalidRequest(f"{len(value)} labels are more than {LABEL_COUNT_LIMIT}")
    for key, text in value.items():
        if len(key.encode()) > LABEL_BYTES_LIMIT or len(text.encode()) > LABEL_BYTES_LIMIT:
            raise InvalidRequest(f"label {key[:40]!r} is longer than {LABEL_BYTES_LIMIT} bytes")
    return dict(value)


Granting = pb.AcquireSandboxRequest | pb.AcquireSandboxesRequest | pb.ForkSandboxRequest


def request_id(request: Granting) -> str:
    if len(request.request_id.encode()) > REQUEST_ID_BYTES_LIMIT:
        raise InvalidRequest(f"request_id is longer than {REQUEST_ID_BYTES_LIMIT} bytes")
    return request.request_id


def lease(request: Granting) -> Lease:
    ttl = seconds(request.ttl, "ttl") if request.HasField("ttl") else None
    return Lease(ttl=ttl, labels=labels(request.labels), request_id=request_id(request))


def claim(request: pb.AcquireSandboxRequest | pb.AcquireSandboxesRequest) -> Claim:
    """One sandbox, or the `count` of a gang."""
    count = request.count if isinstance(request, pb.AcquireSandboxesRequest) else 1
    if not 1 <= count <= GANG_LIMIT:
        raise InvalidRequest(f"count = {count} must be from 1 to {GANG_LIMIT}")
    if abs(request.priority) > PRIORITY_LIMIT:
        raise InvalidRequest(
            f"priority = {request.priority} must be from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}"
        )
    tenant = request.tenant or DEFAULT_TENANT
    if not POOL_ID.fullmatch(tenant):
        raise InvalidRequest(
            f"tenant {tenant[:80]!r} must be a lower-case letter and at most 62 more, digits or dashes"
        )
    return Claim(count, tenant, request.priority)


def position_interval(request: pb.AcquireSandboxesRequest) -> float | None:
    """Seconds; None where the caller does not want to hear."""
    if not request.HasField("position_interval"):
        return None
    interval = seconds(request.position_interval, "position_interval")
    if interval < POSITION_INTERVAL_LEAST:
        raise InvalidRequest(
            f"position_interval = {interval:g} s must be at least {POSITION_INTERVAL_LEAST:g} s"
        )
    return interval


def fork_count(request: pb.ForkSandboxRequest) -> int:
    if not 1 <= request.count <= FORK_LIMIT:
        raise InvalidRequest(f"count = {request.count} must be from 1 to {FORK_LIMIT}")
    return request.count


def image_name(request: pb.SnapshotSandboxRequest) -> str:
    if not request.image:
        raise InvalidRequest("image is empty: name the image to make")
    return request.image


def command(request: pb.ExecCommandRequest, *, interactive: bool = False, resumable: bool = False) -> Command:
    """`resumable`: its id is the request's `resume_id`."""
    if not request.argv:
        raise InvalidRequest("argv is empty: name the program to run")
    if not request.argv[0]:
        raise InvalidRequest("argv[0] is empty: name the program to run")
    if interactive and request.stdin:
        raise InvalidRequest("start.stdin must be empty: its input follows in messages of its own")
    if interactive and (request.command_id or request.detached):
        raise InvalidRequest("start.command_id must be empty: ExecCommand starts named commands")
    if request.detached and not request.command_id:
        raise InvalidRequest("a detached command needs a command_id: nobody could find it again")
    stdin(request.stdin)
    for entry in request.env:
        if not entry.name or b"=" in entry.name or b"\0" in entry.name + entry.value:
            raise InvalidRequest(f"environment name {entry.name!r} is not one that a program can see")
    if b"\0" in b"".join((*request.argv, request.cwd)):
        raise InvalidRequest("argv and cwd cannot contain a zero byte")
    if request.output_limit_bytes < 0:
        raise InvalidRequest(f"output_limit_bytes = {request.output_limit_bytes} must not be negative")
    if not 0 <= request.output_tail_bytes <= TAIL_LIMIT_BYTES:
        raise InvalidRequest(
            f"output_tail_bytes = {request.output_tail_bytes} must be from 0 to {TAIL_LIMIT_BYTES}"
        )
    if request.output_tail_bytes and not request.output_limit_bytes:
        raise InvalidRequest("output_tail_bytes needs output_limit_bytes: without a limit nothing is dropped")
    name = request.resume_id if resumable else request.command_id
    return Command(
        argv=tuple(request.argv),
        cwd=request.cwd or None,
        env={entry.name: entry.value for entry in request.env},
        stdin=request.stdin,
        timeout=seconds(request.timeout, "timeout") if request.HasField("timeout") else None,
        output_limit=request.output_limit_bytes or None,
        output_tail=request.output_tail_bytes,
        terminal=terminal_size(request.terminal) if request.HasField("terminal") else None,
        interactive=interactive,
        user=command_user(request.user),
        id=command_id(name) if name else "",
        detached=request.detached,
        resumable=resumable,
    )


def bounded_command(request: pb.ExecCommandRequest) -> Command:
    """A command all of whose output fits into one message."""
    if not 0 < request.output_limit_bytes <= RUN_OUTPUT_LIMIT_BYTES:
        raise InvalidRequest(
            f"output_limit_bytes = {request.output_limit_bytes} must be from 1 to {RUN_OUTPUT_LIMIT_BYTES}"
            " for RunCommand; ExecCommand takes more, or none"
        )
    if request.resume_id and request.command_id:
        raise InvalidRequest("resume_id takes the place of command_id: leave one of them out")
    return command(request, resumable=bool(request.resume_id))


def command_user(value: str) -> str:
    """A user, and perhaps a group behind a colon, each by name or number; or nobody."""
    user, *group = value.split(":")
    right = all((user, *group)) and len(group) < 2 and "\0" not in value
    if value and not (right and len(value.encode()) <= USER_BYTES_LIMIT):
        raise InvalidRequest(
            f"user {value[:80]!r} must be NAME, UID, NAME:GROUP or UID:GID, at most {USER_BYTES_LIMIT} bytes"
        )
    for part in (user, *group):
        # Compared by length first: Python reads no number of thousands of digits.
        digits = part.lstrip("0") if part.isascii() and part.isdigit() else ""
        if len(digits) > len(str(ID_LIMIT)) or int(digits or 0) > ID_LIMIT:
            raise InvalidRequest(f"user {value[:80]!r}: {part[:40]} is not from 0 to {ID_LIMIT}")
    return value


def command_id(value: str) -> str:
    if not COMMAND_ID.fullmatch(value):
        raise InvalidRequest(
            f"command_id {value[:80]!r} must be a lower-case letter and at most 62 more, digits or dashes"
        )
    return value


def offsets(request: pb.AttachCommandRequest) -> dict[str, int]:
    if request.stdout_offset < 0 or request.stderr_offset < 0:
        raise InvalidRequest("stdout_offset and stderr_offset must not be negative")
    return {"stdout_offset": request.stdout_offset, "stderr_offset": request.stderr_offset}


def stdin(value: bytes) -> bytes:
    if len(value) > STDIN_LIMIT_BYTES:
        raise InvalidRequest(f"stdin of {len(value)} bytes is more than {STDIN_LIMIT_BYTES}")
    return value


def terminal_size(value: pb.TerminalSize) -> tuple[int, int]:
    """Rows and columns."""
    if not (1 <= value.rows <= TERMINAL_SIDE_LIMIT and 1 <= value.columns <= TERMINAL_SIDE_LIMIT):
        raise InvalidRequest(
            f"a terminal of {value.rows} rows and {value.columns} columns: "
            f"both must be from 1 to {TERMINAL_SIDE_LIMIT}"
        )
    return value.rows, value.columns


def signal_number(value: int) -> int:
    if not 1 <= value <= SIGNAL_LIMIT:
        raise InvalidRequest(f"signal {value} must be from 1 to {SIGNAL_LIMIT}")
    return value


def path(value: bytes) -> bytes:
    if not value or b"\0" in value:
        raise InvalidRequest(f"path {value!r} must not be empty or contain a zero byte")
    return value


def file_mode(value: int) -> int:
    if value > FILE_MODE_LIMIT:
        raise InvalidRequest(f"mode {value:#o} has bits beyond {FILE_MODE_LIMIT:#o}")
    return value or FILE_MODE_DEFAULT


def file_range(request: pb.ReadFileRequest) -> tuple[int, int | None]:
    if request.offset < 0 or request.limit_bytes < 0:
        raise InvalidRequest("offset and limit_bytes must not be negative")
    return request.offset, request.limit_bytes or None


def page(entries: Sequence[Entry], size: int, token: str) -> tuple[Sequence[Entry], str]:
    """One page of a listing, and the token of the next (empty on the last)."""
    # More digits than any token that was given would be no number either: Python refuses to read them.
    if size < 0 or (token and not token.isdecimal()) or len(token) > PAGE_TOKEN_LIMIT:
        raise InvalidRequest(f"page_size {size} or page_token {token[:80]!r} is not valid")
    begin = int(token or 0)
    end = begin + min(size or PAGE_SIZE_DEFAULT, PAGE_SIZE_LIMIT)
    return entries[begin:end], str(end) if end < len(entries) else ""


def duration(value: float) -> duration_pb2.Duration:
    # Without FromNanoseconds, which does the same in five times as long.
    whole, nanos = divmod(int(value * 1e9), 1_000_000_000)
    return duration_pb2.Duration(seconds=whole, nanos=nanos)


def timestamp(value: float) -> timestamp_pb2.Timestamp:
    whole, nanos = divmod(int(value * 1e9), 1_000_000_000)
    return timestamp_pb2.Timestamp(seconds=whole, nanos=nanos)


def sandbox(pool_name: str, value: Sandbox, calendar_offset: float) -> pb.Sandbox:
    """`calendar_offset` turns the pool's clock into seconds since 1970."""
    held = value.state is SandboxState.ACTIVE
    return pb.Sandbox(
        name=SANDBOX_PREFIX + value.id,
        pool=POOL_PREFIX + pool_name,
        state=value.state.name,
        create_time=timestamp(value.created + calendar_offset),
        expire_time=None if value.expiry is None else timestamp(value.expiry + calendar_offset),
        labels=value.labels,
        ttl=duration(value.ttl) if value.ttl else None,
        start_phases=None if value.phases is None else _start_phases(value.phases),
        tenant=value.tenant if held else "",
        lease_time=timestamp(value.leased + calendar_offset) if held and value.leased is not None else None,
    )


def _start_phases(value: StartPhases) -> pb.StartPhases:
    return pb.StartPhases(
        attempt_count=value.attempts,
        retry_duration=_unless_none(value.retry),
        pull_duration=_unless_none(value.pull),
        create_duration=_unless_none(value.create),
        start_duration=_unless_none(value.start),
        ready_duration=_unless_none(value.ready),
        setup_duration=_unless_none(value.setup),
    )


def _unless_none(seconds: float) -> duration_pb2.Duration | None:
    """A phase that took no time is left out."""
    return duration(seconds) if seconds > 0 else None


def queue_position(value: QueuePosition) -> pb.QueuePosition:
    expected = value.expected_wait
    return pb.QueuePosition(
        callers_ahead_count=value.callers_ahead,
        sandboxes_ahead_count=value.sandboxes_ahead,
        expected_wait_duration=None if expected is None else duration(min(expected, LONGEST_SECONDS)),
    )


def file_info(value: FileInfo) -> pb.FileInfo:
    return pb.FileInfo(
        name=value.name,
        type=value.kind.value,
        size_bytes=value.size,
        mode=value.mode,
        modify_time=timestamp(min(max(value.modified, FIRST_SECOND), LAST_SECOND)),
        link_target=value.target,
    )


def command_info(value: CommandInfo) -> pb.CommandInfo:
    return pb.CommandInfo(
        command_id=value.id,
        state=pb.CommandInfo.RUNNING if value.running else pb.CommandInfo.EXITED,
        stdout=_kept(value.stdout),
        stderr=_kept(value.stderr),
    )


def _kept(value: Kept) -> pb.KeptOutput:
    return pb.KeptOutput(begin_offset=value.begin, end_offset=value.end)


def event(value: Event) -> pb.ExecCommandResponse:
    match value:
        case Started():
            return STARTED
        case Stdout(data, offset):
            return pb.ExecCommandResponse(stdout=pb.CommandOutput(offset=offset, data=data))
        case Stderr(data, offset):
            return pb.ExecCommandResponse(stderr=pb.CommandOutput(offset=offset, data=data))
        case Exited():
            return pb.ExecCommandResponse(exited=_exited(value))


def _exited(value: Exited) -> pb.CommandExited:
    return pb.CommandExited(
        reason=value.reason.value,
        exit_code=value.exit_code,
        signal=value.signal,
        wall_duration=duration(value.wall),
        cpu_duration=duration(value.cpu),
        detail=value.detail,
    )
