"""Between what the daemon knows of its pools and the messages of the proto."""

from __future__ import annotations

import uuid

from google.protobuf import duration_pb2

from sandboxd.announcements import Preparation
from sandboxd.errors import InvalidRequest
from sandboxd.pool import Pool
from sandboxd.types import POOL_PREFIX, PoolStats, Reloaded, Share
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.wire import LONGEST_SECONDS, REQUEST_ID_BYTES_LIMIT, duration, timestamp

COUNT_LIMIT = 1_000_000
# How far apart two messages of a watch are: the default, and what may be asked for.
INTERVAL_SECONDS, INTERVAL_LEAST, INTERVAL_MOST = 0.25, 0.02, 60.0
HEARTBEAT_SECONDS, HEARTBEAT_MOST = 5.0, 3600.0
# How long sandboxes that were announced are kept when nobody comes for them.
GRACE_SECONDS = 60.0


def resize(target: Pool, wanted: pb.Pool) -> None:
    """Applies the fields of an UpdatePool that are set."""
    stats = target.stats()
    warm = wanted.warm_count_target if wanted.HasField("warm_count_target") else stats.warm_target
    size = wanted.size_limit if wanted.HasField("size_limit") else stats.size_limit
    if not 1 <= size <= COUNT_LIMIT:
        raise InvalidRequest(f"size_limit {size} must be from 1 to {COUNT_LIMIT}")
    if not 0 <= warm <= size:
        raise InvalidRequest(f"warm_count_target {warm} must be from 0 to size_limit {size}")
    # A target that follows demand is not made the least that is kept because something else is changed.
    target.resize(warm_target=warm if wanted.HasField("warm_count_target") else None, size_limit=size)


def watch_pace(request: pb.WatchPoolRequest) -> tuple[float, float]:
    """The least and the longest time between two messages, in seconds."""
    interval = _given(request.min_interval) if request.HasField("min_interval") else INTERVAL_SECONDS
    if not INTERVAL_LEAST <= interval <= INTERVAL_MOST:
        raise InvalidRequest(
            f"min_interval = {interval:g} s must be from {INTERVAL_LEAST:g} to {INTERVAL_MOST:g} s"
        )
    beat = _given(request.heartbeat) if request.HasField("heartbeat") else max(HEARTBEAT_SECONDS, interval)
    if not interval <= beat <= HEARTBEAT_MOST:
        raise InvalidRequest(
            f"heartbeat = {beat:g} s must be from min_interval, {interval:g} s, to {HEARTBEAT_MOST:g} s"
        )
    return interval, beat


def announcement(request: pb.PrewarmPoolRequest) -> tuple[str, int, float, float]:
    """Its id, how many, in how many seconds, and how long they are kept then."""
    if not 0 <= request.count <= COUNT_LIMIT:
        raise InvalidRequest(f"count = {request.count} must be from 0 to {COUNT_LIMIT}")
    if len(request.announcement_id.encode()) > REQUEST_ID_BYTES_LIMIT:
        raise InvalidRequest(f"announcement_id is longer than {REQUEST_ID_BYTES_LIMIT} bytes")
    if not request.count and not request.announcement_id:
        raise InvalidRequest("count = 0 withdraws an announcement: name it by announcement_id")
    within = _given(request.within)
    grace = _given(request.grace) if request.HasField("grace") else GRACE_SECONDS
    for name, value in (("within", within), ("grace", grace)):
        if not 0 <= value <= LONGEST_SECONDS:
            raise InvalidRequest(f"{name} = {value:g} s must be from 0 to {LONGEST_SECONDS:g} s")
    return request.announcement_id or uuid.uuid4().hex, request.count, within, grace


def preparation(value: Preparation, calendar_offset: float) -> pb.PrewarmPoolResponse:
    """`calendar_offset` turns the pool's clock into seconds since 1970."""
    return pb.PrewarmPoolResponse(
        count=value.count,
        begin_time=timestamp(value.begin + calendar_offset),
        ready_time=None if value.ready is None else timestamp(value.ready + calendar_offset),
        expire_time=timestamp(value.expiry + calendar_offset),
    )


def reloaded(value: Reloaded) -> pb.ReloadConfigResponse:
    """What new settings have done."""
    return pb.ReloadConfigResponse(
        added=[POOL_PREFIX + name for name in value.added],
        removed=[POOL_PREFIX + name for name in value.removed],
        changed=[POOL_PREFIX + name for name in value.changed],
    )


def _given(value: duration_pb2.Duration) -> float:
    return value.ToNanoseconds() / 1e9


def pool(name: str, stats: PoolStats) -> pb.Pool:
    """A pool with its numbers."""
    return pb.Pool(
        name=POOL_PREFIX + name,
        warm_count_target=stats.warm_target,
        size_limit=stats.size_limit,
        starting_count=stats.starting,
        warm_count=stats.warm,
        active_count=stats.active,
        waiting_count=stats.waiting,
        deleting_count=stats.deleting,
        acquired_total=stats.acquired_total,
        released_total=stats.released_total,
        expired_total=stats.expired_total,
        lost_total=stats.lost_total,
        started_total=stats.started_total,
        start_failures_total=stats.start_failures_total,
        start_duration=_duration(stats.start_seconds),
        last_failure=stats.last_failure,
        quarantined_count=stats.quarantined,
        unhealthy_total=stats.unhealthy_total,
        reused_total=stats.reused_total,
        state=f"POOL_STATE_{stats.state}",
        start_limit=stats.start_limit,
        state_reason=stats.state_reason,
        starts_per_second=stats.starts_per_second,
        next_free_duration=_duration(stats.next_free_seconds),
        oldest_wait_duration=_duration(stats.oldest_wait_seconds),
        announced_count=stats.announced,
    )


def share(pool_name: str, value: Share) -> pb.TenantShare:
    """What a tenant has of a pool."""
    return pb.TenantShare(
        pool=POOL_PREFIX + pool_name,
        tenant=value.tenant,
        weight=value.weight,
        active_count=value.active,
        waiting_count=value.waiting,
        wanted_count=value.wanted,
    )


def _duration(value: float | None) -> duration_pb2.Duration | None:
    return None if value is None else duration(min(value, LONGEST_SECONDS))
