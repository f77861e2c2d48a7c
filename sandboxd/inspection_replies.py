"""What the client makes of the daemon's messages on what went wrong with a sandbox."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from sandboxd.replies import SandboxInfo, info
from sandboxd.types import SANDBOX_PREFIX
from sandboxd.v1 import sandbox_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class SandboxFailure:
    """Why a sandbox failed; `when` is in seconds since 1970. Of a start, `attempt` says which it was."""

    sandbox: str
    phase: str
    cause: str
    message: str
    log: str
    when: float
    attempt: int


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """All that the daemon knows of a sandbox; `info.state` is GONE where only `failure` is left.

    `uses` counts its leases. `start_seconds` is None where another daemon started it, or nobody did.
    `answered`, in seconds since 1970, is when it last answered before it was leased. `place` is where it is
    on the daemon's host: `pid`, `directory`, `container`.
    """

    info: SandboxInfo
    uses: int
    start_seconds: float | None
    answered: float | None
    failure: SandboxFailure | None
    place: dict[str, str] = field(default_factory=dict)


def report(reply: pb.InspectSandboxResponse) -> SandboxReport:
    """All that is known of one sandbox."""
    started = reply.HasField("start_duration")
    return SandboxReport(
        info=info(reply.sandbox) if reply.sandbox.state else gone(reply.sandbox),
        uses=reply.use_count,
        start_seconds=reply.start_duration.ToNanoseconds() / 1e9 if started else None,
        answered=reply.answer_time.ToNanoseconds() / 1e9 if reply.HasField("answer_time") else None,
        failure=failure(reply.failure) if reply.HasField("failure") else None,
        place=dict(reply.place),
    )


def gone(sandbox: pb.Sandbox) -> SandboxInfo:
    """Of one that is remembered only."""
    return dataclasses.replace(info(sandbox), state="GONE")


def failure(reply: pb.SandboxFailure) -> SandboxFailure:
    """Why one failed."""
    return SandboxFailure(
        sandbox=reply.sandbox.removeprefix(SANDBOX_PREFIX),
        phase=reply.phase,
        cause=reply.cause,
        message=reply.message,
        log=reply.log,
        when=reply.failure_time.ToNanoseconds() / 1e9,
        attempt=reply.attempt,
    )
