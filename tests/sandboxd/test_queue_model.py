"""A pool and its callers under arbitrary steps: gangs, priorities, deadlines, callers that leave, deaths.

Never has a sandbox two holders, never is one lost to the count, and whoever is left is served in the end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sandboxd.backends.fake import FakeBackend, FakeScript
from sandboxd.clock import ManualClock
from sandboxd.errors import AcquireTimedOut, InvalidRequest, QueueFull, SandboxLost
from sandboxd.leases import Lease
from sandboxd.ledger import Bounds
from sandboxd.pool import Pool, PoolOptions
from sandboxd.queueing import Claim
from sandboxd.sandbox import Sandbox
from sandboxd.types import Template

from .conftest import settle

SIZE, WAITING, START_SECONDS = 5, 6, 1.0
EXPECTED = (AcquireTimedOut, QueueFull, InvalidRequest, SandboxLost)


@dataclass(eq=False)
class Caller:
    """One call, and what it holds once it has ended well."""

    claim: Claim
    call: asyncio.Task[list[Sandbox]]
    deadline: float
    held: list[str] = field(default_factory=list)
    told: bool = False


class AnyCallers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.backend = FakeBackend(FakeScript(start_seconds=START_SECONDS), clock=self.clock)
        options = PoolOptions(Bounds(1, SIZE, 3, WAITING, {"b": 3}), default_ttl=1e6)
        self.pool = Pool("p", backend=self.backend, template=Template("p"), options=options, clock=self.clock)
        self.callers: list[Caller] = []
        self.block = self.pool.run()
        self.runner.run(self.block.__aenter__())
        self.step(0.0)

    def step(self, seconds: float) -> None:
        """Lets time pass, and every caller hear what there is to hear."""

        async def pass_by() -> None:
            await settle()
            self.clock.advance(seconds)
            await settle()

        self.runner.run(pass_by())
        for caller in self.callers:
            if caller.call.done() and not caller.told:
                caller.told = True
                self.hear(caller)

    def hear(self, caller: Caller) -> None:
        if caller.call.cancelled():
            return
        error = caller.call.exception()
        if error is None:
            caller.held = [sandbox.id for sandbox in caller.call.result()]
            assert len(set(caller.held)) == caller.claim.count, "a gang came in part"
            return
        assert isinstance(error, EXPECTED)
        assert isinstance(error, InvalidRequest) == (caller.claim.count > SIZE)
        if isinstance(error, AcquireTimedOut):
            assert self.clock.now() >= caller.deadline, "it was sent away before its time"
            assert int(error.metadata["position"]) < WAITING

    @rule(
        count=st.integers(1, SIZE + 1),
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        timeout=st.sampled_from([None, None, 0.0, 1.5, 4.0]),
    )
    def come(self, count: int, tenant: str, priority: int, timeout: float | None) -> None:
        async def acquire() -> list[Sandbox]:
            return await self.pool.acquire_all(Lease(), claim, timeout=timeout)

        claim = Claim(count, tenant, priority)
        call = self.runner.get_loop().create_task(acquire())
        deadline = float("inf") if timeout is None else self.clock.now() + timeout
        self.callers.append(Caller(claim, call, deadline))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.step(seconds)
        held = {sandbox_id for caller in self.callers for sandbox_id in caller.held}
        assert held == self.pool._ledger.active, "a sandbox is leased to nobody"

    @rule(seconds=st.sampled_from([0.0, 1.0]), passes=st.integers(0, 9))
    def wait_for_a_moment(self, seconds: float, passes: int) -> None:
        """The next step finds grants that their callers have not heard of."""

        async def pass_by() -> None:
            self.clock.advance(seconds)
            for _ in range(passes):
                await asyncio.sleep(0)

        self.runner.run(pass_by())

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiting = [caller for caller in self.callers if not caller.call.done()]
        if waiting:
            data.draw(st.sampled_from(waiting)).call.cancel()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holders = [caller for caller in self.callers if caller.held]
        if holders:
            held = data.draw(st.sampled_from(holders)).held
            self.in_loop(self.pool.release, held.pop(data.draw(st.integers(0, len(held) - 1))))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.step(0.0)
        ids = self.runner.run(self.backend.list_ids())
        if ids:
            dead = data.draw(st.sampled_from(ids))
            self.in_loop(self.backend.kill, dead)
            self.step(0.0)
            for caller in self.callers:
                caller.held = [held for held in caller.held if held != dead]

    def in_loop(self, act: object, argument: str) -> None:
        async def call() -> None:
            act(argument)  # type: ignore[operator]

        self.runner.run(call())

    @invariant()
    def no_sandbox_has_two_holders(self) -> None:
        held = [sandbox_id for caller in self.callers for sandbox_id in caller.held]
        assert len(held) == len(set(held))
        assert set(held) <= {sandbox.id for sandbox in self.pool.sandboxes()}

    @invariant()
    def the_counts_agree(self) -> None:
        ledger = self.pool._ledger
        ledger.check()
        assert ledger.size == len(self.pool.sandboxes()) <= SIZE
        assert len(ledger.waiting) <= WAITING

    def teardown(self) -> None:
        # A start takes a second, so each waiter is served within a few, or its deadline passes.
        for _ in range(4 * WAITING + 8):
            for caller in self.callers:
                while caller.held:
                    self.in_loop(self.pool.release, caller.held.pop())
            self.step(START_SECONDS)
        assert all(caller.call.done() for caller in self.callers), "somebody waits for ever"
        stats = self.pool.stats()
        assert (stats.active, stats.waiting) == (0, 0)
        assert stats.acquired_total == stats.released_total + stats.lost_total
        self.runner.run(self.block.__aexit__(None, None, None))
        assert self.runner.run(self.backend.list_ids()) == []
        self.runner.close()


TestAnyCallers = AnyCallers.TestCase
TestAnyCallers.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
