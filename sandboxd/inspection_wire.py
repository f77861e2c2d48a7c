"""What is known of one sandbox, and why others failed: the daemon's values as messages."""

from __future__ import annotations

from sandboxd import wire
from sandboxd.care import Failure
from sandboxd.inspecting import Inspection
from sandboxd.types import POOL_PREFIX, SANDBOX_PREFIX
from sandboxd.v1 import sandbox_service_pb2 as pb


def inspection(pool_name: str, value: Inspection, calendar_offset: float) -> pb.InspectSandboxResponse:
    """`calendar_offset` turns the pool's clock into seconds since 1970."""
    sandbox, failed = value.sandbox, value.failure
    reply = pb.InspectSandboxResponse(
        sandbox=pb.Sandbox(name=SANDBOX_PREFIX + value.name, pool=POOL_PREFIX + pool_name)
        if sandbox is None
        else wire.sandbox(pool_name, sandbox, calendar_offset),
        failure=None if failed is None else failure(failed),
        place=value.place,
    )
    if sandbox is not None:
        reply.use_count = sandbox.uses
        if sandbox.start_seconds is not None:
            reply.start_duration.CopyFrom(wire.duration(sandbox.start_seconds))
        if sandbox.answered is not None:
            reply.answer_time.CopyFrom(wire.timestamp(sandbox.answered + calendar_offset))
    return reply


def failure(value: Failure) -> pb.SandboxFailure:
    """Why a sandbox failed."""
    return pb.SandboxFailure(
        sandbox=SANDBOX_PREFIX + value.sandbox,
        phase=value.phase.value,
        cause=value.cause.value,
        message=value.message,
        log=value.log,
        failure_time=wire.timestamp(value.when),
        attempt=value.attempt,
    )
