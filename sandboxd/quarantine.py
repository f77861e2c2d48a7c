"""Sandboxes that failed, kept for a while to be looked at, and what is known of all that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sandboxd.backends.base import Connection
from sandboxd.care import Care, Failure, Failures
from sandboxd.clock import Clock
from sandboxd.errors import SandboxdError
from sandboxd.journal import Journal
from sandboxd.ledger import Ledger
from sandboxd.sandbox import Sandbox
from sandboxd.types import SandboxState

logger = logging.getLogger(__name__)


class Quarantine:
    """Of one pool; `destroy` is told whose time is over, the ledger knows it by then.

    One that is kept is nobody's: the next daemon destroys it.
    """

    def __init__(
        self, ledger: Ledger, care: Care, clock: Clock, journal: Journal, destroy: Callable[[Sandbox], None]
    ) -> None:
        self.failures = Failures()
        self._ledger = ledger
        self.care = care
        self._clock = clock
        self._journal = journal
        self._destroy = destroy

    @property
    def keeps(self) -> bool:
        """Whether there is any place in it."""
        return self._ledger.bounds.quarantine_limit > 0

    def note(self, sandbox_id: str, error: SandboxdError, attempt: int = 1) -> None:
        """Remembers why a sandbox failed."""
        self.failures.add(Failure.of(sandbox_id, error, self._clock.wall(), attempt))

    def offered(self, sandbox: Sandbox, connection: Connection) -> bool:
        """One that is there and whose start failed for good: whether it is kept."""
        if not self.keeps or sandbox.state is not SandboxState.STARTING:
            return False
        sandbox.connection = connection
        return True

    def take_unhealthy(self, sandbox: Sandbox, error: SandboxdError, tasks: asyncio.TaskGroup) -> None:
        """A ready one does not answer: it is kept, or destroyed where nothing is."""
        logger.warning("sandbox %s is taken out of its pool: %s", sandbox.id, error.message)
        self.note(sandbox.id, error)
        if self.keeps:
            self._ledger.quarantine(sandbox.id)
            self.hold(sandbox, tasks)
        else:
            self._ledger.lose(sandbox.id)
            self._destroy(sandbox)

    def take_doubtful(self, sandbox: Sandbox, error: SandboxdError, tasks: asyncio.TaskGroup) -> None:
        """A reset one is not as new: it is kept, or destroyed where nothing is."""
        logger.warning("sandbox %s is not used again: %s", sandbox.id, error.message)
        self.note(sandbox.id, error)
        sandbox.task = None
        self._ledger.reset_failed(sandbox.id, keep=self.keeps)
        if self.keeps:
            self.hold(sandbox, tasks)
        else:
            self._destroy(sandbox)

    def hold(self, sandbox: Sandbox, tasks: asyncio.TaskGroup) -> None:
        """Keeps one that the ledger counts as quarantined until its time is over; call `Fleet.pump` next."""
        if sandbox.task:
            sandbox.task.cancel()
        sandbox.state = SandboxState.QUARANTINED
        self._journal.forget(sandbox.id)
        sandbox.task = tasks.create_task(self._hold(sandbox), name=f"quarantine {sandbox.id}")

    async def _hold(self, sandbox: Sandbox) -> None:
        await self._clock.sleep(self.care.quarantine_seconds)
        sandbox.task = None
        self._ledger.release_quarantined(sandbox.id)
        self._destroy(sandbox)
