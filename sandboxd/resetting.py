"""Used sandboxes that are leased again: reset under a new name, proven to be as new, or not used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from sandboxd.backends.base import Connection
from sandboxd.care import Care
from sandboxd.errors import StartFailed
from sandboxd.journal import Journal
from sandboxd.ledger import Ledger
from sandboxd.proof import Proof
from sandboxd.quarantine import Quarantine
from sandboxd.sandbox import Sandbox
from sandboxd.starting import faults_fail_the_start
from sandboxd.types import SandboxState, Template

# A reset costs what a start costs, and many leases may end at once.
RESETS_AT_ONCE = 8


class Owner(Protocol):
    """The fleet, as far as resets know it."""

    sandboxes: dict[str, Sandbox]
    ledger: Ledger
    journal: Journal
    quarantine: Quarantine

    def pump(self) -> None: ...


class Resets:
    """Of one pool. `ready` is told of each that is as new, before the ledger; `new` makes what is known of
    a sandbox. `care` and `proof` may be changed.
    """

    def __init__(
        self,
        owner: Owner,
        care: Care,
        proof: Proof,
        *,
        ready: Callable[[Sandbox], None],
        new: Callable[[str, Template, str], Sandbox],
    ) -> None:
        self.care = care
        self.proof = proof
        self._owner = owner
        self._ready = ready
        self._new = new
        self._slots = asyncio.Semaphore(RESETS_AT_ONCE)

    async def look_at_new(self, sandbox_id: str, connection: Connection) -> None:
        """As `Proof.look_at_new`, where sandboxes are reset at all."""
        if self.care.max_uses > 1:
            await self.proof.look_at_new(sandbox_id, connection)

    def may_begin(self, sandbox: Sandbox, made_from: str) -> bool:
        """Whether it may be leased once more, its pool needs another, and it is known how a new one looks.

        Forks are used once, for they begin with another's files, and so is what was made from another
        template than the pool's, whose digest is `made_from`.
        """
        alike = sandbox.template is None and sandbox.made_from == made_from and self.proof.possible
        return alike and sandbox.uses < self.care.max_uses and self._owner.ledger.may_reuse()

    def begin(self, old: Sandbox, tasks: asyncio.TaskGroup) -> None:
        """ACTIVE → gone, its place RESETTING under a new name; call `Fleet.pump` next."""
        owner = self._owner
        name = owner.ledger.reuse(old.id)
        if old.task:
            old.task.cancel()
        old.state = SandboxState.DELETING
        owner.journal.forget(old.id)
        del owner.sandboxes[old.id]
        sandbox = owner.sandboxes[name] = self._new(name, self.proof.template, old.made_from)
        sandbox.state, sandbox.was, sandbox.uses = SandboxState.RESETTING, old.id, old.uses
        sandbox.task = tasks.create_task(self._reset(old, sandbox, tasks), name=f"reset {old.id}")

    async def _reset(self, old: Sandbox, sandbox: Sandbox, tasks: asyncio.TaskGroup) -> None:
        try:
            async with self._slots:
                with faults_fail_the_start(f"resetting {old.id}", known=StartFailed):
                    sandbox.connection = await self.proof.reset(old, sandbox.id)
        except StartFailed as error:
            if sandbox.state is SandboxState.RESETTING:
                self._owner.quarantine.take_doubtful(sandbox, error, tasks)
                self._owner.pump()
            return
        # Else the pool has ended meanwhile, and destroys it.
        if sandbox.state is SandboxState.RESETTING:
            self._ready(sandbox)
            self._owner.ledger.reset_done(sandbox.id)
            self._owner.pump()
