"""The starts of a pool that are under way: one task each, from the ledger's decision until it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from sandboxd import stopwatch
from sandboxd.availability import Availability
from sandboxd.backends.base import Connection
from sandboxd.clock import Clock
from sandboxd.errors import StartFailed
from sandboxd.ledger import Ledger
from sandboxd.listener import Listener
from sandboxd.quarantine import Quarantine
from sandboxd.regulator import Regulator
from sandboxd.sandbox import Sandbox
from sandboxd.starting import Starter, faults_fail_the_start
from sandboxd.telemetry.recorder import (
    ATTEMPT_FAILURES,
    START_DURATION,
    Attributes,
    begun_by,
    count,
    current,
    step,
    timed,
)
from sandboxd.types import SandboxState


class Owner(Protocol):
    """The fleet, as far as starts know it."""

    sandboxes: dict[str, Sandbox]
    availability: Availability
    ledger: Ledger
    regulator: Regulator
    quarantine: Quarantine
    listener: Listener

    pump_soon: Callable[[], None]

    def pump(self) -> None: ...

    def is_ready(self, sandbox: Sandbox) -> None: ...

    def destroy_uncounted(self, sandbox: Sandbox) -> None: ...


class Starts:
    """Of one pool. `starter` may be changed: those that begin from then on are its. `look` sees each new
    sandbox before it is ready, and may raise StartFailed.
    """

    def __init__(
        self,
        owner: Owner,
        starter: Starter,
        clock: Clock,
        look: Callable[[str, Connection], Awaitable[None]],
    ) -> None:
        self.starter = starter
        self._owner = owner
        self._clock = clock
        self._look = look
        self._slots: dict[str, asyncio.Future[None]] = {}

    def begin(self, sandbox: Sandbox, tasks: asyncio.TaskGroup, cause: object) -> None:
        """One that the ledger counts as starting. `cause` is the span of its caller, if it has one."""
        sandbox.task = tasks.create_task(self._start(sandbox, tasks, cause), name=f"start {sandbox.id}")

    def resume(self, sandbox_id: str) -> None:
        """One that waits to be tried again has a slot."""
        self._slots.pop(sandbox_id).set_result(None)

    def withdraw(self, sandbox: Sandbox) -> None:
        """STARTING → gone. Counted out here: a task that is cancelled before its first step never runs."""
        if sandbox.task:
            sandbox.task.cancel()
        sandbox.state = SandboxState.DELETING
        self._owner.ledger.start_withdrawn(sandbox.id)
        self._slots.pop(sandbox.id, None)
        del self._owner.sandboxes[sandbox.id]

    async def _start(self, sandbox: Sandbox, tasks: asyncio.TaskGroup, cause: object) -> None:
        owner, begin = self._owner, self._clock.now()
        try:
            with (
                begun_by(cause, "start sandbox", _told_of(sandbox)),
                stopwatch.timed(self._clock.now) as watch,
            ):
                sandbox.span = current.get()
                with timed(START_DURATION, self._clock.now, _told_of(sandbox, name=False)):
                    sandbox.connection = await self._create(sandbox)
                sandbox.phases = watch.read()
        except StartFailed as error:
            if sandbox.id in owner.sandboxes:
                self._failed(sandbox, error, tasks)
            return
        finally:
            if sandbox.unclean and sandbox.id not in owner.sandboxes:
                owner.destroy_uncounted(sandbox)
        if sandbox.id not in owner.sandboxes:
            # Finished in the moment of its cancellation.
            owner.destroy_uncounted(sandbox)
            return
        now = self._clock.now()
        sandbox.start_seconds = now - begin
        owner.regulator.started(now, sandbox.start_seconds)
        owner.is_ready(sandbox)
        owner.ledger.start_succeeded(sandbox.id)
        owner.pump_soon()

    async def _create(self, sandbox: Sandbox) -> Connection:
        owner = self._owner

        async def between(pause: float) -> None:
            owner.availability.suspect()
            owner.ledger.attempt_failed(sandbox.id)
            owner.pump()
            with step("back off"):
                await self._clock.sleep(pause)
                owner.ledger.attempt_due(sandbox.id)
                slot = self._slots[sandbox.id] = asyncio.get_running_loop().create_future()
                owner.pump()
                await slot

        def failed(error: StartFailed, attempt: int) -> None:
            owner.quarantine.note(sandbox.id, error, attempt)
            phase = str(error.phase or "")
            count(ATTEMPT_FAILURES, {**_told_of(sandbox, name=False), "sandboxd.phase": phase})

        keep = partial(owner.quarantine.offered, sandbox)
        with faults_fail_the_start(f"starting {sandbox.id}", known=StartFailed):
            connection = await self.starter.start(
                sandbox.id, between=between, failed=failed, keep=keep, left=sandbox.is_unclean
            )
            await self._look(sandbox.id, connection)
            return connection

    def _failed(self, sandbox: Sandbox, error: StartFailed, tasks: asyncio.TaskGroup) -> None:
        owner = self._owner
        owner.availability.suspect()
        self._slots.pop(sandbox.id, None)
        kept = sandbox.connection is not None
        owner.regulator.health.failed(self._clock.now(), error.message, error.metadata.get("log", ""))
        for ticket in owner.ledger.start_failed(sandbox.id, all_waiters=not error.retryable, keep=kept):
            owner.listener.refused(ticket, error)
        if kept:
            sandbox.task = None
            owner.quarantine.hold(sandbox, tasks)
        else:
            del owner.sandboxes[sandbox.id]
            if sandbox.unclean:
                owner.destroy_uncounted(sandbox)
        owner.pump()


def _told_of(sandbox: Sandbox, *, name: bool = True) -> Attributes:
    """What telemetry says of it: its name is that of its pool and a number."""
    pool = {"sandboxd.pool": sandbox.id.rpartition("-")[0]}
    return {**pool, "sandboxd.sandbox": sandbox.id} if name else pool
