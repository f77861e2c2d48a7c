"""Backends that end or fail while many wait: nobody is sent away for what was no fault of its own start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sandboxd.availability import Availability
from sandboxd.backends.fake import FakeBackend, FakeConnection
from sandboxd.backends.link import DIED, Link
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.clock import Clock, ManualClock, MonotonicClock
from sandboxd.errors import BackendUnavailable, SandboxLost, StartFailed
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.sandbox import Sandbox
from sandboxd.starting import AWAY_LIMIT, RetryPolicy
from sandboxd.types import PoolState, Template

from .conftest import Rig, settle
from .docker_kit import run
from .namespace_kit import opened

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]
ONCE = RetryPolicy(attempts=1, pause=0.001, pause_limit=0.01)


def test_each_order_to_a_launcher_that_dies_hears_of_it() -> None:
    """One a turn of the loop that the daemon has: a write fails a turn before its reader hears of that."""

    async def orders() -> set[str]:
        ours, theirs = socket.socketpair()
        link = Link(*await asyncio.open_unix_connection(sock=ours))
        await asyncio.sleep(0)
        theirs.close()
        met = set()
        for number in range(20):
            try:
                link.order("create", id=f"p-{number}").add_done_callback(lambda done: done.exception())
            except BackendUnavailable as error:
                met.add(error.message)
            await asyncio.sleep(0)
        await link.close()
        return met

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(orders()) == {DIED}


async def test_an_answer_that_is_cut_off_is_the_launchers_end() -> None:
    ours, theirs = socket.socketpair()
    link = Link(*await asyncio.open_unix_connection(sock=ours))
    answer = link.order("hello")
    theirs.sendall(b'{"n": 1, "pi')
    theirs.close()
    async with asyncio.timeout(20):
        with pytest.raises(BackendUnavailable, match=DIED):
            await answer
        await link.task
    await link.close()


class Fault(FakeBackend):
    """Its own code fails: in the creations whose numbers are `wrong`, counted from 1."""

    def __init__(self, clock: ManualClock, wrong: range) -> None:
        super().__init__(clock=clock)
        self.asked_total = 0
        self._wrong = wrong

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        self.asked_total += 1
        if self.asked_total in self._wrong:
            raise RuntimeError("the handler is closed")
        return await super().create(sandbox_id, template)


def pool_on(backend: Any, clock: Clock, *, template: Template | None = None, starts: int = 64) -> Pool:
    options = PoolOptions(Bounds(0, 100, starts, 100), default_ttl=600.0, retry=ONCE)
    return Pool("p", backend=backend, template=template or Template("p"), options=options, clock=clock)


async def test_a_fault_in_one_start_sends_nobody_else_away(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_on(Fault(clock, range(3, 6)), clock, starts=1)
    async with pool.run():
        ends = await asyncio.gather(*(pool.acquire() for _ in range(50)), return_exceptions=True)
    failed = [end for end in ends if not isinstance(end, Sandbox)]
    assert [str(end) for end in failed] == [str(failed[0])] * 3
    assert "attempt 1: start after 0.00 s: RuntimeError: the handler is closed" in str(failed[0])
    assert sum(record.exc_info is not None for record in caplog.records) == 1


async def test_a_fault_is_tried_again_as_what_a_host_does(clock: ManualClock) -> None:
    backend = Fault(clock, range(1, 3))
    options = PoolOptions(Bounds(0, 9, 9, 9), retry=RetryPolicy(attempts=3))
    pool = Pool("p", backend=backend, template=Template("p"), options=options, clock=clock)
    async with pool.run():
        acquiring = asyncio.ensure_future(pool.acquire())
        await passing(clock, acquiring)
        assert (await acquiring).id
    assert backend.asked_total == 3


async def test_a_fault_in_every_start_makes_no_storm(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Fault(clock, range(1, 10_000))
    options = PoolOptions(Bounds(32, 64, 8, 9), retry=ONCE)
    pool = Pool("p", backend=backend, template=Template("p"), options=options, clock=clock)
    async with pool.run():
        await settle()
        assert pool.stats().state is PoolState.DEGRADED
        for _ in range(40):
            clock.advance(0.25)
            await settle()
        # Pauses of 1, 2, 4 and so on, after those that were under way at first.
        assert backend.asked_total <= 8 + 4
    told = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    why = "attempt 1: start after 0.00 s: RuntimeError: the handler is closed"
    assert told == [
        "starting a sandbox of template 'p'",
        f"pool p is DEGRADED: no sandbox of template 'p' could be started ({why})",
    ]


async def passing(clock: ManualClock, waiting: asyncio.Future[Any], seconds: float = 0.25) -> None:
    """Lets time pass until it is over, in steps: whoever wakes may sleep again."""
    async with asyncio.timeout(20):
        while not waiting.done():
            clock.advance(seconds)
            await settle()


async def test_attempts_that_meet_no_backend_are_not_used_up(rig: OpenRig) -> None:
    async with rig(retry=RetryPolicy(attempts=2)) as r:
        r.backend.script.first_failures = [StartFailed("its own fault")]
        r.backend.script.trouble = "the launcher died"
        waiting = [asyncio.ensure_future(r.pool.acquire()) for _ in range(20)]
        await tried(r, 20 * 5)
        assert not any(each.done() for each in waiting)
        r.backend.script.trouble = ""
        await passing(r.clock, asyncio.gather(*waiting))
        assert r.pool.stats().start_failures_total >= 20 * 5 + 1


async def tried(r: Rig, failures: int) -> None:
    async with asyncio.timeout(20):
        while r.pool.stats().start_failures_total < failures:
            r.clock.advance(0.25)
            await settle()


async def test_its_own_faults_are_used_up_among_others(rig: OpenRig) -> None:
    async with rig(retry=RetryPolicy(attempts=2)) as r:
        r.backend.script.trouble = "the launcher died"
        waiting = asyncio.ensure_future(r.pool.acquire())
        await tried(r, 3)
        r.backend.script.first_failures = [StartFailed("one"), StartFailed("two"), StartFailed("three")]
        r.backend.script.trouble = ""
        await passing(r.clock, waiting)
        with pytest.raises(StartFailed, match=r"the launcher died; attempt 4: .*: one; attempt 5: .*: two\)"):
            await waiting


async def test_a_sandbox_that_ends_its_backend_each_time_is_given_up(rig: OpenRig) -> None:
    async with rig(retry=RetryPolicy(attempts=2)) as r:
        r.backend.script.trouble = "the launcher died"
        waiting = asyncio.ensure_future(r.pool.acquire())
        await passing(r.clock, waiting, 8.0)
        with pytest.raises(StartFailed, match=f"attempt {AWAY_LIMIT}: ") as raised:
            await waiting
        assert raised.value.metadata["attempts"] == str(AWAY_LIMIT)


async def test_a_long_outage_uses_up_no_budget(rig: OpenRig) -> None:
    async with rig(retry=RetryPolicy(attempts=2, budget=90.0)) as r, looked_at(r):
        r.backend.script.trouble = "the Engine is being mended"
        waiting = asyncio.ensure_future(r.pool.acquire())
        for _ in range(20):
            await r.advance(1.0)
        with pytest.raises(BackendUnavailable, match="is being mended"):
            await waiting
        for _ in range(20):
            await r.advance(10.0)
        r.backend.script.first_failures = [StartFailed("its own fault")]
        r.backend.script.trouble = ""
        waiting = asyncio.ensure_future(acquired_when_there(r))
        await passing(r.clock, waiting)
        assert await waiting


@contextlib.asynccontextmanager
async def looked_at(r: Rig) -> AsyncIterator[None]:
    availability = Availability(r.backend, r.clock)
    r.pool.depend_on(availability)
    looking = asyncio.create_task(availability.run())
    await settle()
    yield
    looking.cancel()


async def acquired_when_there(r: Rig) -> Sandbox:
    while r.pool.state is PoolState.UNAVAILABLE:
        await r.clock.sleep(0.1)
    return await r.pool.acquire()


async def test_a_fault_that_strikes_while_the_backend_is_away_is_a_loss(rig: OpenRig) -> None:
    async with rig(faults=["die 1"]) as r:
        held = await r.pool.acquire()
        r.backend.script.trouble = "the launcher died"
        with pytest.raises(SandboxLost, match="a fault was asked for: die"):
            await run(r.pool.connection(held.id), "true")
        r.backend.script.trouble = ""
        await passing(r.clock, asyncio.ensure_future(r.until(lambda: "0 deleting" in r.counts)))


async def test_a_setup_that_was_killed_is_tried_again(rig: OpenRig, tmp_path: Path) -> None:
    """By the host, say, that has no memory left: nobody knows that the next would be."""
    script = f"[ -e {tmp_path / 'again'} ] || {{ touch {tmp_path / 'again'}; kill -9 $$; }}"
    async with rig(template=Template("p", setup=(b"sh", b"-c", script.encode()))) as r:
        waiting = asyncio.ensure_future(r.pool.acquire())
        await r.until(lambda: "1 backing off" in r.counts)
        await r.advance(1.0)
        async with asyncio.timeout(20):
            assert (await waiting).id
        assert r.pool.stats().start_failures_total == 1


def kill_launcher(backend: NamespaceBackend) -> None:
    assert backend.launcher_pid is not None
    os.kill(backend.launcher_pid, signal.SIGKILL)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that launchers see, who are not its user. None below pytest's own, which another session
    of it shuts to others at any moment.
    """
    with tempfile.TemporaryDirectory(prefix="sandboxd-shared-") as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path


async def test_a_launcher_killed_in_the_midst_of_setups_uses_up_no_attempt(
    tmp_path: Path, shared: Path
) -> None:
    setup = f"until [ -e {shared}/go ]; do sleep 0.05; done"
    template = Template("p", setup=(b"sh", b"-c", setup.encode()))
    async with opened(tmp_path / "state", NamespaceOptions(read_only_paths=(shared,))) as backend:
        pool = pool_on(backend, MonotonicClock(), template=template)
        async with asyncio.timeout(40), pool.run():
            waiting = [asyncio.ensure_future(pool.acquire()) for _ in range(8)]
            for _ in range(2):
                while len(await backend.list_ids()) < 8:
                    await asyncio.sleep(0.01)
                kill_launcher(backend)
            (shared / "go").touch()
            await asyncio.gather(*waiting)


SLOW_PYTHON = """#!/bin/sh
if [ -e {fifo} ]; then read go <{fifo}; fi
exec {python} "$@"
"""


async def test_the_time_in_which_a_launcher_is_replaced_is_no_starts_own(tmp_path: Path) -> None:
    python, fifo = tmp_path / "python", tmp_path / "fifo"
    python.write_text(SLOW_PYTHON.format(fifo=fifo, python=sys.executable))
    python.chmod(0o755)
    clock, template = ManualClock(), Template("p", start_timeout=1000.0)
    async with opened(tmp_path / "state", NamespaceOptions(python=str(python))) as backend:
        os.mkfifo(fifo)
        pool = pool_on(backend, clock, template=template)
        async with asyncio.timeout(40), pool.run():
            link = await backend._linking.connected()
            kill_launcher(backend)
            await backend.keeper_ended()
            while not link.broken:
                await asyncio.sleep(0.01)
            waiting = asyncio.ensure_future(pool.acquire())
            # Opened when the other end is.
            with await asyncio.to_thread(fifo.open, "w") as go:
                clock.advance(1001.0)
                await settle()
                fifo.unlink()
                go.write("on\n")
            await waiting
