"""A pool, its journal and its clients under arbitrary steps, with the daemon killed at any write of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from sandboxd.backends.fake import FakeBackend
from sandboxd.care import Care
from sandboxd.clock import ManualClock
from sandboxd.errors import LeaseExpired, SandboxdError, SandboxLost, SandboxNotFound
from sandboxd.journal import Ending, Entry, Past
from sandboxd.journal_file import JournalFile, PoolJournal
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds, Totals
from sandboxd.pool import Pool, PoolOptions
from sandboxd.recovery import reclaim, recover
from sandboxd.starting import RetryPolicy
from sandboxd.types import SandboxState, Template

from .conftest import settle
from .silent_kit import Silent

TTL = 60.0
Result = TypeVar("Result")


class Host(FakeBackend):
    """What outlives a daemon. Sandboxes of a daemon that is dead neither come nor go by its word."""


class Life:
    """One daemon's: once it is over, nothing that the pool still does reaches the host or the journal."""

    def __init__(self) -> None:
        self.over = False
        self.ends_before_write = self.ends_after_write = False


class Mortal(FakeBackend):
    """A daemon's hands on the host."""

    def __init__(self, host: Host, life: Life, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self._host, self._life = host, life

    async def create(self, sandbox_id: str, template: Template) -> Any:
        await self._while_alive()
        return Silent(await self._host.create(sandbox_id, template))

    async def reset(self, sandbox_id: str, new_id: str, template: Template) -> Any:
        await self._while_alive()
        return Silent(await self._host.reset(sandbox_id, new_id, template))

    async def adopt(self, sandbox_id: str, template: Template) -> Any:
        # Else the new daemon would wait for an answer by a clock that nobody moves.
        if sandbox_id in await self._host.list_ids():
            self._host.thaw(sandbox_id)
        return Silent(await self._host.adopt(sandbox_id, template))

    async def destroy(self, sandbox_id: str) -> None:
        if not self._life.over:
            await self._host.destroy(sandbox_id)

    async def list_ids(self) -> list[str]:
        return await self._host.list_ids()

    async def _while_alive(self) -> None:
        if self._life.over:
            await asyncio.get_running_loop().create_future()


class MortalJournal:
    """Implements `Journal`; the daemon may be killed just before or just after it writes."""

    def __init__(self, inner: PoolJournal, life: Life) -> None:
        self._inner, self._life = inner, life
        self._noted = False

    def past(self) -> Past:
        return self._inner.past()

    def keep(self, entry: Entry) -> None:
        self._noted = True
        self._inner.keep(entry)

    def forget(self, sandbox_id: str) -> None:
        self._noted = True
        self._inner.forget(sandbox_id)

    def ended(self, ending: Ending) -> None:
        self._noted = True
        self._inner.ended(ending)

    def commit(self, totals: Totals) -> None:
        if not self._noted or self._life.over:
            return
        self._noted = False
        self._life.over = self._life.ends_before_write
        if not self._life.over:
            self._inner.commit(totals)
            self._life.over = self._life.ends_after_write


class Daemon:
    """A pool that runs until it is killed."""

    size = 4

    def __init__(self, host: Host, path: Path, clock: ManualClock) -> None:
        self.life, self.clock = Life(), clock
        self._files = ExitStack()
        file = self._files.enter_context(JournalFile(path).open())
        self._backend = Mortal(host, self.life, clock)
        self._journal = MortalJournal(file.pool("p"), self.life)
        options = PoolOptions(
            Bounds(2, self.size, 3, 10, quarantine_limit=2),
            default_ttl=TTL,
            retry=RetryPolicy(attempts=1),
            care=Care(max_uses=3),
        )
        template = Template("p")
        self.pool = Pool(
            "p", backend=self._backend, template=template, options=options, clock=clock, journal=self._journal
        )
        self._stop = asyncio.Event()

    async def start(self) -> None:
        there = set(await self._backend.list_ids())
        taken = await recover(self.pool, self._backend, self._journal, there)
        await reclaim(self._backend, there - taken, self.clock)
        self._task = asyncio.create_task(self._run())
        await settle()

    async def _run(self) -> None:
        async with self.pool.run():
            await self._stop.wait()

    async def kill(self) -> None:
        self.life.over = True
        self._stop.set()
        await self._task
        self._files.close()


class Crashes(RuleBasedStateMachine):
    """`held` is what clients have heard: request → sandbox. What they have not heard they ask for again."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._directory = tempfile.TemporaryDirectory()
        self.clock = ManualClock()
        self.host = Host(clock=self.clock)
        self.held: dict[str, str] = {}
        self.ended: dict[str, type[SandboxdError] | tuple[type[SandboxdError], ...]] = {}
        self.renewed: dict[str, float] = {}
        self._count = 0
        self.daemon = self._run(self._new())

    def _run(self, work: Awaitable[Result]) -> Result:
        async def go() -> Result:
            return await work

        return self._runner.run(go())

    async def _new(self) -> Daemon:
        daemon = Daemon(self.host, Path(self._directory.name) / "journal.sqlite3", self.clock)
        await daemon.start()
        return daemon

    async def _restart(self) -> None:
        await self.daemon.kill()
        self.daemon = await self._new()

    async def _after(self) -> None:
        await settle()
        if self.daemon.life.over:
            await self._restart()
        self._forget_expired()

    def _forget_expired(self) -> None:
        """The daemon's word on what ran out is taken: the timers are other tests' business."""
        for request, name in list(self.held.items()):
            try:
                self.daemon.pool.get(name)
            except LeaseExpired:
                del self.held[request]
                self.ended[name] = LeaseExpired
            except SandboxdError:
                continue

    async def _acquire(self, request: str) -> None:
        daemon = self.daemon
        asking = asyncio.ensure_future(daemon.pool.acquire(Lease(request_id=request), timeout=1.0))
        await settle()
        if not asking.done():
            self.clock.advance(1.5)
            await settle()
        heard = None
        if not daemon.life.over and asking.done() and asking.exception() is None:
            heard = asking.result().id
        if not asking.done():
            asking.cancel()
        await asyncio.wait([asking])
        asking.cancelled() or asking.exception()
        if heard is not None:
            assert self.held.get(request, heard) == heard, "one request, two sandboxes"
            assert heard not in self.ended, "an ended sandbox was leased again"
            assert heard not in {name for other, name in self.held.items() if other != request}
            self.held[request] = heard

    @rule(target=requests)
    def acquire(self) -> str:
        self._count += 1
        request = f"r{self._count}"
        self._run(self._acquire(request))
        self._run(self._after())
        return request

    @rule(request=requests)
    def ask_again(self, request: str) -> None:
        name = self.held.get(request)
        self._run(self._acquire(request))
        self._run(self._after())
        if name is not None and name not in self.ended and request in self.held:
            assert self.held[request] == name

    @rule(request=requests)
    def release(self, request: str) -> None:
        name = self.held.pop(request, None)
        if name is None:
            return
        daemon = self.daemon
        self._run(self._release(name))
        # Not heard of, it may still be leased until its time runs out.
        self.ended[name] = SandboxNotFound if not daemon.life.over else (SandboxdError,)
        self._run(self._after())
        if daemon.life.over and self._leased(name):
            del self.ended[name]
            self.held[request] = name

    async def _release(self, name: str) -> None:
        self.daemon.pool.release(name)

    @rule()
    def all_are_leased_and_one_comes_back(self) -> None:
        """Then the pool wants another, and makes it of the one that came back."""
        for _ in range(self.daemon.size):
            self.acquire()
        if self.held:
            self.release(next(iter(self.held)))

    def _leased(self, name: str) -> bool:
        try:
            self.daemon.pool.get(name)
        except SandboxdError:
            return False
        return True

    @rule(request=requests)
    def renew(self, request: str) -> None:
        if request not in self.held:
            return
        self.time_passes(5.0)
        daemon, name = self.daemon, self.held.get(request)
        if name is None:
            return
        daemon.pool.renew(name)
        if not daemon.life.over:
            self.renewed[name] = self.clock.now() + TTL
        self._run(self._after())

    @rule(request=requests)
    def the_sandbox_dies(self, request: str) -> None:
        name = self.held.pop(request, None)
        if name is None:
            return
        self.host.kill(name)
        self.ended[name] = SandboxLost
        self._run(self._after())

    @rule(request=requests)
    def the_sandbox_dies_while_no_daemon_runs(self, request: str) -> None:
        name = self.held.pop(request, None)
        if name is None:
            return

        async def die() -> None:
            await self.daemon.kill()
            self.host.kill(name)
            self.daemon = await self._new()

        self._run(die())
        self.ended[name] = SandboxLost
        self._run(self._after())

    @rule(which=st.integers(0, 9))
    def a_ready_one_stops_answering(self, which: int) -> None:
        """It is found by and by, kept for a while, and never leased after that."""
        daemon = self.daemon
        ready = [sandbox.id for sandbox in self.daemon.pool.sandboxes() if sandbox.state is SandboxState.WARM]
        if not ready:
            return
        name = ready[which % len(ready)]
        self.host.freeze(name)
        for _ in range(5):
            self.time_passes(10.0)
        if self.daemon is daemon:
            self.ended[name] = SandboxNotFound

    @rule(seconds=st.sampled_from([0.5, 20.0, 70.0]))
    def waits(self, seconds: float) -> None:
        self.time_passes(seconds)

    def time_passes(self, seconds: float) -> None:
        async def pass_by() -> None:
            self.clock.advance(seconds)
            await self._after()

        self._run(pass_by())

    @rule()
    def kill(self) -> None:
        self._run(self._restart())
        self._run(self._after())

    @rule(before=st.booleans())
    def will_be_killed_at_the_next_write(self, before: bool) -> None:
        self.daemon.life.ends_before_write, self.daemon.life.ends_after_write = before, not before

    @invariant()
    def who_holds_a_sandbox_still_does(self) -> None:
        for request, name in self.held.items():
            sandbox = self.daemon.pool.get(name)
            assert sandbox.request_id == request
            assert sandbox.expiry is not None
            assert sandbox.expiry >= self.renewed.get(name, 0.0)

    @invariant()
    def what_ended_stays_ended(self) -> None:
        for name, how in self.ended.items():
            try:
                self.daemon.pool.get(name)
            except how:
                continue
            raise AssertionError(f"{name} is leased again")

    @invariant()
    def nothing_leaks_and_the_books_close(self) -> None:
        self.daemon.pool.check()
        there = set(self._run(self.host.list_ids()))
        known = {sandbox.id for sandbox in self.daemon.pool.sandboxes()}
        assert there <= known, "a sandbox that the pool does not know"

    def teardown(self) -> None:
        self._run(self.daemon.kill())
        self._run(self.host.close())
        self._runner.close()
        self._directory.cleanup()


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
