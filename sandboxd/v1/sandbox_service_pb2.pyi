import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_STATE_UNSPECIFIED: _ClassVar[PoolState]
    POOL_STATE_OK: _ClassVar[PoolState]
    POOL_STATE_DEGRADED: _ClassVar[PoolState]
    POOL_STATE_DRAINING: _ClassVar[PoolState]
    POOL_STATE_UNAVAILABLE: _ClassVar[PoolState]
POOL_STATE_UNSPECIFIED: PoolState
POOL_STATE_OK: PoolState
POOL_STATE_DEGRADED: PoolState
POOL_STATE_DRAINING: PoolState
POOL_STATE_UNAVAILABLE: PoolState

class Sandbox(_message.Message):
    __slots__ = ("name", "pool", "state", "create_time", "expire_time", "labels", "ttl", "start_phases", "tenant", "lease_time")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Sandbox.State]
        STARTING: _ClassVar[Sandbox.State]
        WARM: _ClassVar[Sandbox.State]
        ACTIVE: _ClassVar[Sandbox.State]
        DELETING: _ClassVar[Sandbox.State]
        QUARANTINED: _ClassVar[Sandbox.State]
        RESETTING: _ClassVar[Sandbox.State]
    STATE_UNSPECIFIED: Sandbox.State
    STARTING: Sandbox.State
    WARM: Sandbox.State
    ACTIVE: Sandbox.State
    DELETING: Sandbox.State
    QUARANTINED: Sandbox.State
    RESETTING: Sandbox.State
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    START_PHASES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    state: Sandbox.State
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    ttl: _duration_pb2.Duration
    start_phases: StartPhases
    tenant: str
    lease_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., state: _Optional[_Union[Sandbox.State, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., start_phases: _Optional[_Union[StartPhases, _Mapping]] = ..., tenant: _Optional[str] = ..., lease_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class StartPhases(_message.Message):
    __slots__ = ("attempt_count", "retry_duration", "pull_duration", "create_duration", "start_duration", "ready_duration", "setup_duration")
    ATTEMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RETRY_DURATION_FIELD_NUMBER: _ClassVar[int]
    PULL_DURATION_FIELD_NUMBER: _ClassVar[int]
    CREATE_DURATION_FIELD_NUMBER: _ClassVar[int]
    START_DURATION_FIELD_NUMBER: _ClassVar[int]
    READY_DURATION_FIELD_NUMBER: _ClassVar[int]
    SETUP_DURATION_FIELD_NUMBER: _ClassVar[int]
    attempt_count: int
    retry_duration: _duration_pb2.Duration
    pull_duration: _duration_pb2.Duration
    create_duration: _duration_pb2.Duration
    start_duration: _duration_pb2.Duration
    ready_duration: _duration_pb2.Duration
    setup_duration: _duration_pb2.Duration
    def __init__(self, attempt_count: _Optional[int] = ..., retry_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pull_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., create_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., start_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ready_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., setup_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AcquireSandboxRequest(_message.Message):
    __slots__ = ("pool", "ttl", "labels", "request_id", "priority", "tenant")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    ttl: _duration_pb2.Duration
    labels: _containers.ScalarMap[str, str]
    request_id: str
    priority: int
    tenant: str
    def __init__(self, pool: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class AcquireSandboxesRequest(_message.Message):
    __slots__ = ("pool", "count", "ttl", "labels", "request_id", "priority", "tenant", "position_interval")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POSITION_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    count: int
    ttl: _duration_pb2.Duration
    labels: _containers.ScalarMap[str, str]
    request_id: str
    priority: int
    tenant: str
    position_interval: _duration_pb2.Duration
    def __init__(self, pool: _Optional[str] = ..., count: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., position_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AcquireSandboxesResponse(_message.Message):
    __slots__ = ("waiting", "acquired")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_FIELD_NUMBER: _ClassVar[int]
    waiting: QueuePosition
    acquired: Sandbox
    def __init__(self, waiting: _Optional[_Union[QueuePosition, _Mapping]] = ..., acquired: _Optional[_Union[Sandbox, _Mapping]] = ...) -> None: ...

class QueuePosition(_message.Message):
    __slots__ = ("callers_ahead_count", "sandboxes_ahead_count", "expected_wait_duration")
    CALLERS_AHEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    SANDBOXES_AHEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    callers_ahead_count: int
    sandboxes_ahead_count: int
    expected_wait_duration: _duration_pb2.Duration
    def __init__(self, callers_ahead_count: _Optional[int] = ..., sandboxes_ahead_count: _Optional[int] = ..., expected_wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewSandboxRequest(_message.Message):
    __slots__ = ("name", "ttl")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttl: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReleaseSandboxRequest(_message.Message):
    __slots__ = ("name", "pool", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class GetSandboxRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListSandboxesRequest(_message.Message):
    __slots__ = ("pool", "page_size", "page_token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: str
    page_size: int
    page_token: str
    def __init__(self, pool: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSandboxesResponse(_message.Message):
    __slots__ = ("sandboxes", "next_page_token")
    SANDBOXES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sandboxes: _containers.RepeatedCompositeFieldContainer[Sandbox]
    next_page_token: str
    def __init__(self, sandboxes: _Optional[_Iterable[_Union[Sandbox, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class InspectSandboxRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class InspectSandboxResponse(_message.Message):
    __slots__ = ("sandbox", "use_count", "start_duration", "answer_time", "failure", "place")
    class PlaceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    USE_COUNT_FIELD_NUMBER: _ClassVar[int]
    START_DURATION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TIME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    sandbox: Sandbox
    use_count: int
    start_duration: _duration_pb2.Duration
    answer_time: _timestamp_pb2.Timestamp
    failure: SandboxFailure
    place: _containers.ScalarMap[str, str]
    def __init__(self, sandbox: _Optional[_Union[Sandbox, _Mapping]] = ..., use_count: _Optional[int] = ..., start_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., answer_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., failure: _Optional[_Union[SandboxFailure, _Mapping]] = ..., place: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SandboxFailure(_message.Message):
    __slots__ = ("sandbox", "phase", "cause", "message", "log", "failure_time", "attempt")
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    FAILURE_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    sandbox: str
    phase: str
    cause: str
    message: str
    log: str
    failure_time: _timestamp_pb2.Timestamp
    attempt: int
    def __init__(self, sandbox: _Optional[str] = ..., phase: _Optional[str] = ..., cause: _Optional[str] = ..., message: _Optional[str] = ..., log: _Optional[str] = ..., failure_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class ListFailuresRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class ListFailuresResponse(_message.Message):
    __slots__ = ("failures",)
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[SandboxFailure]
    def __init__(self, failures: _Optional[_Iterable[_Union[SandboxFailure, _Mapping]]] = ...) -> None: ...

class ForkSandboxRequest(_message.Message):
    __slots__ = ("name", "count", "ttl", "labels", "request_id")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    ttl: _duration_pb2.Duration
    labels: _containers.ScalarMap[str, str]
    request_id: str
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ForkSandboxResponse(_message.Message):
    __slots__ = ("sandboxes",)
    SANDBOXES_FIELD_NUMBER: _ClassVar[int]
    sandboxes: _containers.RepeatedCompositeFieldContainer[Sandbox]
    def __init__(self, sandboxes: _Optional[_Iterable[_Union[Sandbox, _Mapping]]] = ...) -> None: ...

class SnapshotSandboxRequest(_message.Message):
    __slots__ = ("name", "image")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    image: str
    def __init__(self, name: _Optional[str] = ..., image: _Optional[str] = ...) -> None: ...

class SnapshotSandboxResponse(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class EnvironmentVariable(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    value: bytes
    def __init__(self, name: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class ExecCommandRequest(_message.Message):
    __slots__ = ("name", "argv", "cwd", "env", "stdin", "timeout", "output_limit_bytes", "terminal", "output_tail_bytes", "command_id", "detached", "resume_id", "user")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    RESUME_ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    name: str
    argv: _containers.RepeatedScalarFieldContainer[bytes]
    cwd: bytes
    env: _containers.RepeatedCompositeFieldContainer[EnvironmentVariable]
    stdin: bytes
    timeout: _duration_pb2.Duration
    output_limit_bytes: int
    terminal: TerminalSize
    output_tail_bytes: int
    command_id: str
    detached: bool
    resume_id: str
    user: str
    def __init__(self, name: _Optional[str] = ..., argv: _Optional[_Iterable[bytes]] = ..., cwd: _Optional[bytes] = ..., env: _Optional[_Iterable[_Union[EnvironmentVariable, _Mapping]]] = ..., stdin: _Optional[bytes] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., output_limit_bytes: _Optional[int] = ..., terminal: _Optional[_Union[TerminalSize, _Mapping]] = ..., output_tail_bytes: _Optional[int] = ..., command_id: _Optional[str] = ..., detached: _Optional[bool] = ..., resume_id: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class TerminalSize(_message.Message):
    __slots__ = ("rows", "columns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class InteractCommandRequest(_message.Message):
    __slots__ = ("start", "stdin", "stdin_end", "signal", "resize")
    START_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    STDIN_END_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    start: ExecCommandRequest
    stdin: bytes
    stdin_end: _empty_pb2.Empty
    signal: int
    resize: TerminalSize
    def __init__(self, start: _Optional[_Union[ExecCommandRequest, _Mapping]] = ..., stdin: _Optional[bytes] = ..., stdin_end: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., signal: _Optional[int] = ..., resize: _Optional[_Union[TerminalSize, _Mapping]] = ...) -> None: ...

class ExecCommandResponse(_message.Message):
    __slots__ = ("started", "stdout", "stderr", "exited")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    started: CommandStarted
    stdout: CommandOutput
    stderr: CommandOutput
    exited: CommandExited
    def __init__(self, started: _Optional[_Union[CommandStarted, _Mapping]] = ..., stdout: _Optional[_Union[CommandOutput, _Mapping]] = ..., stderr: _Optional[_Union[CommandOutput, _Mapping]] = ..., exited: _Optional[_Union[CommandExited, _Mapping]] = ...) -> None: ...

class AttachCommandRequest(_message.Message):
    __slots__ = ("name", "command_id", "stdout_offset", "stderr_offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    STDOUT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STDERR_OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    command_id: str
    stdout_offset: int
    stderr_offset: int
    def __init__(self, name: _Optional[str] = ..., command_id: _Optional[str] = ..., stdout_offset: _Optional[int] = ..., stderr_offset: _Optional[int] = ...) -> None: ...

class SignalCommandRequest(_message.Message):
    __slots__ = ("name", "command_id", "signal")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    command_id: str
    signal: int
    def __init__(self, name: _Optional[str] = ..., command_id: _Optional[str] = ..., signal: _Optional[int] = ...) -> None: ...

class ListCommandsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListCommandsResponse(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[CommandInfo]
    def __init__(self, commands: _Optional[_Iterable[_Union[CommandInfo, _Mapping]]] = ...) -> None: ...

class ForgetCommandRequest(_message.Message):
    __slots__ = ("name", "command_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    command_id: str
    def __init__(self, name: _Optional[str] = ..., command_id: _Optional[str] = ...) -> None: ...

class CommandInfo(_message.Message):
    __slots__ = ("command_id", "state", "stdout", "stderr")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[CommandInfo.State]
        RUNNING: _ClassVar[CommandInfo.State]
        EXITED: _ClassVar[CommandInfo.State]
    STATE_UNSPECIFIED: CommandInfo.State
    RUNNING: CommandInfo.State
    EXITED: CommandInfo.State
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    state: CommandInfo.State
    stdout: KeptOutput
    stderr: KeptOutput
    def __init__(self, command_id: _Optional[str] = ..., state: _Optional[_Union[CommandInfo.State, str]] = ..., stdout: _Optional[_Union[KeptOutput, _Mapping]] = ..., stderr: _Optional[_Union[KeptOutput, _Mapping]] = ...) -> None: ...

class KeptOutput(_message.Message):
    __slots__ = ("begin_offset", "end_offset")
    BEGIN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    begin_offset: int
    end_offset: int
    def __init__(self, begin_offset: _Optional[int] = ..., end_offset: _Optional[int] = ...) -> None: ...

class RunCommandResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ExecCommandResponse]
    def __init__(self, events: _Optional[_Iterable[_Union[ExecCommandResponse, _Mapping]]] = ...) -> None: ...

class CommandStarted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommandOutput(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class CommandExited(_message.Message):
    __slots__ = ("reason", "exit_code", "signal", "wall_duration", "cpu_duration", "detail")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[CommandExited.Reason]
        EXITED: _ClassVar[CommandExited.Reason]
        SIGNALED: _ClassVar[CommandExited.Reason]
        TIMED_OUT: _ClassVar[CommandExited.Reason]
        OOM_KILLED: _ClassVar[CommandExited.Reason]
        OUTPUT_LIMIT_EXCEEDED: _ClassVar[CommandExited.Reason]
        NOT_STARTED: _ClassVar[CommandExited.Reason]
    REASON_UNSPECIFIED: CommandExited.Reason
    EXITED: CommandExited.Reason
    SIGNALED: CommandExited.Reason
    TIMED_OUT: CommandExited.Reason
    OOM_KILLED: CommandExited.Reason
    OUTPUT_LIMIT_EXCEEDED: CommandExited.Reason
    NOT_STARTED: CommandExited.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    WALL_DURATION_FIELD_NUMBER: _ClassVar[int]
    CPU_DURATION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: CommandExited.Reason
    exit_code: int
    signal: int
    wall_duration: _duration_pb2.Duration
    cpu_duration: _duration_pb2.Duration
    detail: str
    def __init__(self, reason: _Optional[_Union[CommandExited.Reason, str]] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., wall_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cpu_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class WriteFileRequest(_message.Message):
    __slots__ = ("target", "data")
    class Target(_message.Message):
        __slots__ = ("name", "path", "mode")
        NAME_FIELD_NUMBER: _ClassVar[int]
        PATH_FIELD_NUMBER: _ClassVar[int]
        MODE_FIELD_NUMBER: _ClassVar[int]
        name: str
        path: bytes
        mode: int
        def __init__(self, name: _Optional[str] = ..., path: _Optional[bytes] = ..., mode: _Optional[int] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    target: WriteFileRequest.Target
    data: bytes
    def __init__(self, target: _Optional[_Union[WriteFileRequest.Target, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteFileResponse(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class ReadFileRequest(_message.Message):
    __slots__ = ("name", "path", "offset", "limit_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: bytes
    offset: int
    limit_bytes: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[bytes] = ..., offset: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class ReadFileResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FileInfo(_message.Message):
    __slots__ = ("name", "type", "size_bytes", "mode", "modify_time", "link_target")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TYPE_UNSPECIFIED: _ClassVar[FileInfo.Type]
        FILE: _ClassVar[FileInfo.Type]
        DIRECTORY: _ClassVar[FileInfo.Type]
        SYMLINK: _ClassVar[FileInfo.Type]
        OTHER: _ClassVar[FileInfo.Type]
    TYPE_UNSPECIFIED: FileInfo.Type
    FILE: FileInfo.Type
    DIRECTORY: FileInfo.Type
    SYMLINK: FileInfo.Type
    OTHER: FileInfo.Type
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    LINK_TARGET_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    type: FileInfo.Type
    size_bytes: int
    mode: int
    modify_time: _timestamp_pb2.Timestamp
    link_target: bytes
    def __init__(self, name: _Optional[bytes] = ..., type: _Optional[_Union[FileInfo.Type, str]] = ..., size_bytes: _Optional[int] = ..., mode: _Optional[int] = ..., modify_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., link_target: _Optional[bytes] = ...) -> None: ...

class StatFileRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: bytes
    def __init__(self, name: _Optional[str] = ..., path: _Optional[bytes] = ...) -> None: ...

class ListFilesRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: bytes
    def __init__(self, name: _Optional[str] = ..., path: _Optional[bytes] = ...) -> None: ...

class ListFilesResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[FileInfo]
    def __init__(self, files: _Optional[_Iterable[_Union[FileInfo, _Mapping]]] = ...) -> None: ...

class RemoveFileRequest(_message.Message):
    __slots__ = ("name", "path", "recursive")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: bytes
    recursive: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[bytes] = ..., recursive: _Optional[bool] = ...) -> None: ...

class UploadTreeRequest(_message.Message):
    __slots__ = ("target", "data")
    class Target(_message.Message):
        __slots__ = ("name", "path")
        NAME_FIELD_NUMBER: _ClassVar[int]
        PATH_FIELD_NUMBER: _ClassVar[int]
        name: str
        path: bytes
        def __init__(self, name: _Optional[str] = ..., path: _Optional[bytes] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    target: UploadTreeRequest.Target
    data: bytes
    def __init__(self, target: _Optional[_Union[UploadTreeRequest.Target, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadTreeResponse(_message.Message):
    __slots__ = ("entry_count",)
    ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    entry_count: int
    def __init__(self, entry_count: _Optional[int] = ...) -> None: ...

class DownloadTreeRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: bytes
    def __init__(self, name: _Optional[str] = ..., path: _Optional[bytes] = ...) -> None: ...

class DownloadTreeResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "warm_count_target", "size_limit", "starting_count", "warm_count", "active_count", "waiting_count", "deleting_count", "acquired_total", "released_total", "expired_total", "lost_total", "started_total", "start_failures_total", "start_duration", "last_failure", "state_reason", "starts_per_second", "next_free_duration", "oldest_wait_duration", "announced_count", "state", "start_limit", "quarantined_count", "unhealthy_total", "reused_total")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WARM_COUNT_TARGET_FIELD_NUMBER: _ClassVar[int]
    SIZE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    STARTING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WARM_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELETING_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RELEASED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LOST_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STARTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    START_FAILURES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    START_DURATION_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    STATE_REASON_FIELD_NUMBER: _ClassVar[int]
    STARTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NEXT_FREE_DURATION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    START_LIMIT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNHEALTHY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    warm_count_target: int
    size_limit: int
    starting_count: int
    warm_count: int
    active_count: int
    waiting_count: int
    deleting_count: int
    acquired_total: int
    released_total: int
    expired_total: int
    lost_total: int
    started_total: int
    start_failures_total: int
    start_duration: _duration_pb2.Duration
    last_failure: str
    state_reason: str
    starts_per_second: float
    next_free_duration: _duration_pb2.Duration
    oldest_wait_duration: _duration_pb2.Duration
    announced_count: int
    state: PoolState
    start_limit: int
    quarantined_count: int
    unhealthy_total: int
    reused_total: int
    def __init__(self, name: _Optional[str] = ..., warm_count_target: _Optional[int] = ..., size_limit: _Optional[int] = ..., starting_count: _Optional[int] = ..., warm_count: _Optional[int] = ..., active_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., deleting_count: _Optional[int] = ..., acquired_total: _Optional[int] = ..., released_total: _Optional[int] = ..., expired_total: _Optional[int] = ..., lost_total: _Optional[int] = ..., started_total: _Optional[int] = ..., start_failures_total: _Optional[int] = ..., start_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_failure: _Optional[str] = ..., state_reason: _Optional[str] = ..., starts_per_second: _Optional[float] = ..., next_free_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., oldest_wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., announced_count: _Optional[int] = ..., state: _Optional[_Union[PoolState, str]] = ..., start_limit: _Optional[int] = ..., quarantined_count: _Optional[int] = ..., unhealthy_total: _Optional[int] = ..., reused_total: _Optional[int] = ...) -> None: ...

class PrewarmPoolRequest(_message.Message):
    __slots__ = ("name", "count", "within", "grace", "announcement_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    within: _duration_pb2.Duration
    grace: _duration_pb2.Duration
    announcement_id: str
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., within: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., announcement_id: _Optional[str] = ...) -> None: ...

class PrewarmPoolResponse(_message.Message):
    __slots__ = ("count", "begin_time", "ready_time", "expire_time")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TIME_FIELD_NUMBER: _ClassVar[int]
    READY_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    count: int
    begin_time: _timestamp_pb2.Timestamp
    ready_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, count: _Optional[int] = ..., begin_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ready_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ReloadConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadConfigResponse(_message.Message):
    __slots__ = ("added", "removed", "changed")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedScalarFieldContainer[str]
    removed: _containers.RepeatedScalarFieldContainer[str]
    changed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, added: _Optional[_Iterable[str]] = ..., removed: _Optional[_Iterable[str]] = ..., changed: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchPoolRequest(_message.Message):
    __slots__ = ("name", "min_interval", "heartbeat")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    name: str
    min_interval: _duration_pb2.Duration
    heartbeat: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., min_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchPoolResponse(_message.Message):
    __slots__ = ("pools", "read_time")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    READ_TIME_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    read_time: _timestamp_pb2.Timestamp
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., read_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("shares",)
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[TenantShare]
    def __init__(self, shares: _Optional[_Iterable[_Union[TenantShare, _Mapping]]] = ...) -> None: ...

class TenantShare(_message.Message):
    __slots__ = ("pool", "tenant", "weight", "active_count", "waiting_count", "wanted_count")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WANTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    tenant: str
    weight: int
    active_count: int
    waiting_count: int
    wanted_count: int
    def __init__(self, pool: _Optional[str] = ..., tenant: _Optional[str] = ..., weight: _Optional[int] = ..., active_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., wanted_count: _Optional[int] = ...) -> None: ...

class UpdatePoolRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...
