"""All that is known of one sandbox: for a person who looks for what went wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from sandboxd.care import Failure
from sandboxd.errors import SandboxdError
from sandboxd.fleet import Fleet
from sandboxd.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Inspection:
    """`sandbox` is None when it is gone; `failure` is why it failed, if it did and that is still known.

    `place` is where it is on this host: see `Backend.describe`.
    """

    name: str
    sandbox: Sandbox | None
    failure: Failure | None = None
    place: dict[str, str] = field(default_factory=dict)


async def inspect(fleet: Fleet, sandbox_id: str, gone: SandboxdError) -> Inspection:
    """Of a sandbox in any state, or of one that is gone with its failure remembered.

    Raises `gone` where it is neither, and BackendUnavailable.
    """
    sandbox = fleet.sandboxes.get(sandbox_id)
    failure = fleet.quarantine.failures.last_of(sandbox_id)
    if sandbox is None and failure is None:
        raise gone
    place = await fleet.describe(sandbox_id)
    if not place and sandbox is not None and sandbox.was:
        # It was being reset when that failed.
        place = await fleet.describe(sandbox.was)
    return Inspection(sandbox_id, sandbox, failure, place)
