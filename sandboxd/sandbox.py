"""What the pool knows of one sandbox, and the part of it that outlives the daemon."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from sandboxd.backends.base import Connection
from sandboxd.errors import Internal, SandboxdError, SandboxLost
from sandboxd.journal import Entry
from sandboxd.lifetime import faults_become
from sandboxd.types import SandboxState, StartPhases, Template


@dataclass(slots=True, eq=False)
class Sandbox:
    """One sandbox of a pool. Times are the pool's clock's."""

    id: str
    created: float
    state: SandboxState = SandboxState.STARTING
    connection: Connection | None = None
    task: asyncio.Task[None] | None = None
    expiry: float | None = None
    ttl: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    gang: int = 1
    """How many its request was given."""
    tenant: str = ""
    """On whose account it is leased; empty where another daemon granted it."""
    leased: float | None = None
    """When it was; None where another daemon granted it."""
    template: Template | None = None
    """Its own, where it is not the pool's: a fork's."""
    origin: Template | None = None
    """That of the pool when it was started."""
    made_from: str = ""
    """The digest of `origin`."""
    uses: int = 0
    """How often it was leased, the present lease included."""
    was: str = ""
    """What it was called when it was last leased, while it is reset."""
    answered: float | None = None
    """When it last said that it is there, as far as it was asked."""
    start_seconds: float | None = None
    """From the decision to start it until it was ready; None where another daemon started it."""
    phases: StartPhases | None = None
    """The same in parts; None where it is a fork, or was reset, too."""

    span: object = None
    """That of its start, where one is recorded."""
    unclean: bool = False
    """Its start has ended, and what it left could not be removed."""

    def is_unclean(self) -> None:
        """The starter's word for it."""
        self.unclean = True

    def entry(self) -> Entry:
        """For the journal."""
        own = self.template
        return Entry(
            self.id,
            self.created,
            self.made_from,
            expiry=self.expiry,
            ttl=self.ttl,
            labels=self.labels,
            request_id=self.request_id,
            gang=self.gang,
            uses=self.uses,
            image=own.image if own else None,
            branches=own.branches if own else (),
            origin=self.origin,
        )

    @classmethod
    def adopted(cls, entry: Entry, connection: Connection, pool_template: Template) -> Sandbox:
        """One that an earlier daemon started."""
        return cls(
            entry.id,
            entry.created,
            state=SandboxState.WARM if entry.expiry is None else SandboxState.ACTIVE,
            connection=connection,
            expiry=entry.expiry,
            ttl=entry.ttl,
            labels=entry.labels,
            request_id=entry.request_id,
            gang=entry.gang,
            uses=entry.uses,
            template=template_of(entry, pool_template) if entry.branches else None,
            origin=entry.origin,
            made_from=entry.made_from,
        )


async def lost(sandbox: Sandbox) -> str:
    """Returns, with the cause in words, when it has died. One that cannot be watched any more counts as dead:
    nobody would hear of its end.
    """
    if sandbox.connection is None:
        raise Internal(f"sandbox {sandbox.id!r} is ready but has no connection")
    try:
        with faults_become(SandboxLost, f"watching {sandbox.id}"):
            return await sandbox.connection.wait_lost()
    except SandboxdError as error:
        return error.message


def template_of(entry: Entry, pool_template: Template) -> Template:
    """What the sandbox of this entry was made from, and what its commands get; as far as the journal does not
    say, it is taken to be what the pool is made from now.
    """
    origin = entry.origin or pool_template
    if not entry.branches:
        return origin
    return replace(origin, image=entry.image, branches=entry.branches, setup=())
