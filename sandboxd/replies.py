"""What the client makes of the daemon's messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sandboxd.types import (
    POOL_PREFIX,
    SANDBOX_PREFIX,
    CommandInfo,
    Event,
    Exited,
    ExitReason,
    FileInfo,
    FileKind,
    Kept,
    PoolState,
    PoolStats,
    QueuePosition,
    Reloaded,
    Share,
    Started,
    StartPhases,
    Stderr,
    Stdout,
)
from sandboxd.v1 import sandbox_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Cut:
    """`dropped` bytes are missing from an output, before the byte at index `at` of what is left.

    Of a named command several parts may be missing: `at` is then the last place, and `dropped` counts all.
    """

    at: int
    dropped: int


class Output:
    """One stream's pieces, joined; `cut` is where some were left out."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.cut: Cut | None = None

    def add(self, piece: bytes, offset: int) -> None:
        dropped = self.cut.dropped if self.cut else 0
        if offset > len(self.data) + dropped:
            self.cut = Cut(len(self.data), offset - len(self.data))
        self.data += piece


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended, and what it printed. `wall` and `cpu` are in seconds.

    `stdout_cut` and `stderr_cut` say where bytes between the head and the tail were dropped, and how many.
    """

    reason: ExitReason
    exit_code: int
    signal: int
    stdout: bytes
    stderr: bytes
    wall: float
    cpu: float
    detail: str = ""
    stdout_cut: Cut | None = None
    stderr_cut: Cut | None = None

    @property
    def ok(self) -> bool:
        """True when the program ended by itself with exit code 0."""
        return self.reason is ExitReason.EXITED and self.exit_code == 0


class Gathered:
    """The events of one command, as they come; `result` once the last has."""

    def __init__(self) -> None:
        self.result: ExecResult | None = None
        self._stdout, self._stderr = Output(), Output()

    def add(self, event: Event) -> None:
        match event:
            case Stdout(data, offset):
                self._stdout.add(data, offset)
            case Stderr(data, offset):
                self._stderr.add(data, offset)
            case Exited():
                self.result = self._result(event)

    def _result(self, end: Exited) -> ExecResult:
        return ExecResult(
            reason=end.reason,
            exit_code=end.exit_code,
            signal=end.signal,
            stdout=bytes(self._stdout.data),
            stderr=bytes(self._stderr.data),
            wall=end.wall,
            cpu=end.cpu,
            detail=end.detail,
            stdout_cut=self._stdout.cut,
            stderr_cut=self._stderr.cut,
        )


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """One sandbox as the daemon lists it; times are in seconds since 1970.

    `expires` is None while it is not leased. `ttl` is how long a renewal lasts that says nothing, in seconds.
    `start` says how long its start took; None where another daemon started it, or it is a fork or was reset.
    `tenant` holds the lease, granted at `leased`; empty and None where an earlier daemon granted it.
    """

    name: str
    pool: str
    state: str
    created: float
    expires: float | None
    labels: dict[str, str]
    ttl: float = 0.0
    start: StartPhases | None = None
    tenant: str = ""
    leased: float | None = None


def event(response: pb.ExecCommandResponse) -> Event:
    """One event of a running command."""
    match response.WhichOneof("event"):
        case "stdout":
            return Stdout(response.stdout.data, response.stdout.offset)
        case "stderr":
            return Stderr(response.stderr.data, response.stderr.offset)
        case "exited":
            end = response.exited
            return Exited(
                reason=ExitReason(pb.CommandExited.Reason.Name(end.reason)),
                exit_code=end.exit_code,
                signal=end.signal,
                wall=end.wall_duration.ToNanoseconds() / 1e9,
                cpu=end.cpu_duration.ToNanoseconds() / 1e9,
                detail=end.detail,
            )
        case _:
            return Started()


def command_info(reply: pb.CommandInfo) -> CommandInfo:
    """One named command."""
    running = reply.state == pb.CommandInfo.RUNNING
    return CommandInfo(reply.command_id, running, _kept(reply.stdout), _kept(reply.stderr))


def _kept(reply: pb.KeptOutput) -> Kept:
    return Kept(reply.begin_offset, reply.end_offset)


def file_info(reply: pb.FileInfo) -> FileInfo:
    """What is at a path."""
    return FileInfo(
        name=reply.name,
        kind=FileKind(pb.FileInfo.Type.Name(reply.type)),
        size=reply.size_bytes,
        mode=reply.mode,
        modified=reply.modify_time.ToNanoseconds() / 1e9,
        target=reply.link_target,
    )


def queue_position(reply: pb.QueuePosition) -> QueuePosition:
    """Where a caller stands."""
    expected = reply.expected_wait_duration.ToNanoseconds() / 1e9
    return QueuePosition(
        reply.callers_ahead_count,
        reply.sandboxes_ahead_count,
        expected if reply.HasField("expected_wait_duration") else None,
    )


def stats(pool: pb.Pool) -> PoolStats:
    """A pool's counts and totals."""
    return PoolStats(
        warm_target=pool.warm_count_target,
        size_limit=pool.size_limit,
        starting=pool.starting_count,
        warm=pool.warm_count,
        active=pool.active_count,
        waiting=pool.waiting_count,
        deleting=pool.deleting_count,
        acquired_total=pool.acquired_total,
        released_total=pool.released_total,
        expired_total=pool.expired_total,
        lost_total=pool.lost_total,
        started_total=pool.started_total,
        start_failures_total=pool.start_failures_total,
        start_seconds=_seconds(pool, "start_duration"),
        last_failure=pool.last_failure,
        quarantined=pool.quarantined_count,
        unhealthy_total=pool.unhealthy_total,
        reused_total=pool.reused_total,
        state=PoolState(pb.PoolState.Name(pool.state).removeprefix("POOL_STATE_")),
        state_reason=pool.state_reason,
        start_limit=pool.start_limit,
        starts_per_second=pool.starts_per_second,
        next_free_seconds=_seconds(pool, "next_free_duration"),
        oldest_wait_seconds=_seconds(pool, "oldest_wait_duration"),
        announced=pool.announced_count,
    )


def shares(found: Iterable[pb.TenantShare]) -> dict[str, list[Share]]:
    """What tenants have, by pool."""
    by_pool: dict[str, list[Share]] = {}
    for each in found:
        counts = (each.weight, each.active_count, each.waiting_count, each.wanted_count)
        by_pool.setdefault(each.pool.removeprefix(POOL_PREFIX), []).append(Share(each.tenant, *counts))
    return by_pool


@dataclass(frozen=True, slots=True)
class PrewarmPlan:
    """What a pool will do about an announcement. Times are in seconds since 1970.

    `count` sandboxes fit into the pool. Their starts begin at `begins`; they are ready at `ready`, None where
    no start was measured yet; what nobody acquires is destroyed at `expires`.
    """

    count: int
    begins: float
    ready: float | None
    expires: float


def prewarm_plan(reply: pb.PrewarmPoolResponse) -> PrewarmPlan:
    """What will be done."""
    ready = reply.ready_time.ToNanoseconds() / 1e9 if reply.HasField("ready_time") else None
    return PrewarmPlan(
        count=reply.count,
        begins=reply.begin_time.ToNanoseconds() / 1e9,
        ready=ready,
        expires=reply.expire_time.ToNanoseconds() / 1e9,
    )


def reloaded(reply: pb.ReloadConfigResponse) -> Reloaded:
    """What new settings have done."""
    return Reloaded(*(_names(names) for names in (reply.added, reply.removed, reply.changed)))


def _names(resources: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix(POOL_PREFIX) for name in resources)


def pools(messages: Iterable[pb.Pool]) -> dict[str, PoolStats]:
    """Counts and totals by name."""
    return {pool.name.removeprefix(POOL_PREFIX): stats(pool) for pool in messages}


def _seconds(pool: pb.Pool, field: str) -> float | None:
    return getattr(pool, field).ToNanoseconds() / 1e9 if pool.HasField(field) else None


def info(sandbox: pb.Sandbox) -> SandboxInfo:
    """One entry of a listing."""
    expires = sandbox.expire_time.ToNanoseconds() / 1e9 if sandbox.HasField("expire_time") else None
    return SandboxInfo(
        name=sandbox.name.removeprefix(SANDBOX_PREFIX),
        pool=sandbox.pool.removeprefix(POOL_PREFIX),
        state=pb.Sandbox.State.Name(sandbox.state),
        created=sandbox.create_time.ToNanoseconds() / 1e9,
        expires=expires,
        labels=dict(sandbox.labels),
        ttl=sandbox.ttl.ToNanoseconds() / 1e9,
        start=_start_phases(sandbox.start_phases) if sandbox.HasField("start_phases") else None,
        tenant=sandbox.tenant,
        leased=sandbox.lease_time.ToNanoseconds() / 1e9 if sandbox.HasField("lease_time") else None,
    )


def _start_phases(reply: pb.StartPhases) -> StartPhases:
    spans = (
        *(reply.retry_duration, reply.pull_duration, reply.create_duration),
        *(reply.start_duration, reply.ready_duration, reply.setup_duration),
    )
    return StartPhases(reply.attempt_count, *(span.ToNanoseconds() / 1e9 for span in spans))
