"""One client process of a load: `python -m sandboxd.bench.client_process`, started by `load`.

It talks in lines. It reads its plan and says that it is connected; reads the moment at which the load
begins and says what it saw of each visit; and where sandboxes are held, has them checked and released at the
next two words. Moments are those of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from sandboxd.bench.phases import START_PHASES
from sandboxd.bench.plan import Plan, Visit
from sandboxd.bench.session import all_at_once, run_command
from sandboxd.client import Box, Client
from sandboxd.errors import SandboxdError
from sandboxd.lifetime import end_with_parent


class Visitor:
    """Makes the visits of one plan, and keeps what it is to hold."""

    def __init__(self, client: Client, plan: Plan, begin: float) -> None:
        self._client, self._plan, self._begin = client, plan, begin
        self.visits: list[Visit] = []
        self._held: list[tuple[Visit, Box]] = []

    async def make_all(self) -> None:
        """Returns when the last visit has ended, or holds its sandbox."""
        await asyncio.sleep(max(0.0, self._begin - time.monotonic()))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.callers):
                tasks.create_task(self._go_round())
            for due in sorted(self._plan.due):
                if (pause := due - self._now()) > 0:
                    await asyncio.sleep(pause)
                tasks.create_task(self._visit(due))

    async def _go_round(self) -> None:
        while (now := self._now()) < self._plan.seconds:
            await self._visit(now)

    async def _visit(self, due: float) -> None:
        visit = Visit(due, self._now())
        self.visits.append(visit)
        plan = self._plan
        with _noting(visit):
            box = await self._client.acquire(plan.pool, timeout=plan.patience, labels={"bench": plan.label})
            visit.acquired = self._now()
            if plan.hold is None:
                self._held.append((visit, box))
            if plan.execute:
                with _noting(visit):
                    await self._use(visit, box)
            else:
                visit.done = visit.acquired
            if plan.hold is not None:
                await box.release()
                visit.released = self._now()
        if visit.acquired is not None:
            _note_start(visit, box)

    async def _use(self, visit: Visit, box: Box) -> None:
        end = await run_command(box)
        if end.ok:
            visit.done = self._now()
        else:
            visit.failure = f"the first command ended as {end.reason} {end.exit_code}"
        if self._plan.hold:
            await asyncio.sleep(self._plan.hold)
            await _look(visit, box)

    async def check(self) -> None:
        """Has each sandbox that is held run a second command, where it ran a first."""
        if not self._plan.execute:
            return
        await all_at_once(self._held, lambda pair: _look(*pair))

    async def release(self) -> None:
        async def release(pair: tuple[Visit, Box]) -> None:
            visit, box = pair
            with _noting(visit):
                await box.release()
                visit.released = self._now()

        await all_at_once(self._held, release)

    def _now(self) -> float:
        return time.monotonic() - self._begin


async def _look(visit: Visit, box: Box) -> None:
    visit.alive = False
    with _noting(visit, "after the hold: "):
        end = await run_command(box)
        visit.alive = end.ok
        if not end.ok:
            ending = f"after the hold: the command ended as {end.reason} {end.exit_code}"
            visit.failure = visit.failure or ending


@contextlib.contextmanager
def _noting(visit: Visit, when: str = "") -> Iterator[None]:
    """Enters what the daemon refuses or loses; the first of it is what counts."""
    try:
        yield
    except SandboxdError as error:
        visit.failure = visit.failure or f"{when}{error.reason}: {error}"


def _note_start(visit: Visit, box: Box) -> None:
    """What the daemon told of the sandbox when it was leased, by its calendar alone: ours may be another."""
    info = box.info
    if info.expires is not None:
        visit.age = info.expires - info.ttl - info.created
    if info.start is not None:
        visit.parts = {name: getattr(info.start, name) for name in START_PHASES}


async def _main() -> None:
    end_with_parent()
    plan = Plan.from_line(await _heard())
    async with Client(plan.address) as client:
        # What the connection costs is no part of the load.
        await client.get_pool(plan.pool)
        _say({"connected": True})
        visitor = Visitor(client, plan, json.loads(await _heard())["begin"])
        before = _processor_seconds()
        await visitor.make_all()
        if plan.hold is not None:
            _say(_told(visitor, before))
            return
        _say({"held": True, "cpu_s": _processor_seconds() - before})
        await _heard()
        await visitor.check()
        _say({"checked": True})
        await _heard()
        await visitor.release()
        _say(_told(visitor, before))


def _told(visitor: Visitor, before: float) -> dict[str, Any]:
    rows = [visit.to_row() for visit in visitor.visits]
    return {"visits": rows, "cpu_s": _processor_seconds() - before}


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _heard() -> str:
    """The next line. Whoever sent none has ended, and so does this process."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise SystemExit(1)
    return line


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())
