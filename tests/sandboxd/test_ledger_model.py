"""The ledger under every order of events: its invariants hold after each transition."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from sandboxd.errors import InvalidRequest, PoolFull, QueueFull
from sandboxd.making_room import giving_way
from sandboxd.queueing import Claim

from .test_ledger import make


class AnyOrder(RuleBasedStateMachine):
    """Drives a ledger by random events, as its pool might see them."""

    starting = Bundle("starting")
    backing_off = Bundle("backing_off")
    forking = Bundle("forking")
    resetting = Bundle("resetting")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = make(warm=3, size=8, starts=3, waiting=6, quarantine=2)
        self.granted: set[str] = set()
        self.claims: dict[int, Claim] = {}
        self.known: set[str] = set()

    @rule(target=starting, may_fill=st.booleans(), room=st.none() | st.integers(-1, 4))
    def plan(self, may_fill: bool, room: int | None) -> object:
        plan = self.ledger.plan(may_fill=may_fill, room=room)
        assert room is None or len(plan.start) + len(plan.resume) <= max(0, room)
        assert room is not None or not plan.held_back
        for ticket, names in plan.grant:
            assert len(names) == self.claims[ticket].count, "a gang was granted in part"
            assert self.granted.isdisjoint(names), "one sandbox was granted twice"
            self.granted.update(names)
        assert len(self.ledger.quarantined) <= self.ledger.bounds.quarantine_limit
        assert self.ledger.deleting.issuperset(plan.evict)
        head = self.ledger.waiting.head()
        assert head is None or self.claims[head].count > len(self.ledger.warm), "the head could be served"
        self.known.update(plan.start)
        return multiple(*plan.start, *plan.resume)

    @rule(count=st.integers(1, 9), tenant=st.sampled_from("abc"), priority=st.sampled_from([0, 0, 0, -1, 1]))
    def enqueue(self, count: int, tenant: str, priority: int) -> None:
        claim, before = Claim(count, tenant, priority), set(self.ledger.waiting)
        displaced = self.ledger.displace(claim)
        assert set(self.ledger.waiting) == before - {displaced}
        if count > self.ledger.bounds.size_limit:
            with pytest.raises(InvalidRequest):
                self.ledger.enqueue(claim)
        elif len(self.ledger.waiting) < self.ledger.bounds.waiting_limit:
            self.claims[self.ledger.enqueue(claim)] = claim
        else:
            with pytest.raises(QueueFull):
                self.ledger.enqueue(claim)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.ledger.waiting:
            self.ledger.withdraw(data.draw(st.sampled_from(sorted(self.ledger.waiting))))

    @rule(name=consumes(starting))
    def succeed(self, name: str) -> None:
        self.ledger.start_succeeded(name)

    @rule(target=backing_off, name=consumes(starting))
    def fail_once(self, name: str) -> str:
        self.ledger.attempt_failed(name)
        return name

    @rule(name=consumes(backing_off))
    def due(self, name: str) -> None:
        self.ledger.attempt_due(name)

    @rule(name=consumes(starting), everyone=st.booleans(), keep=st.booleans())
    def fail_for_good(self, name: str, everyone: bool, keep: bool) -> None:
        self.ledger.start_failed(name, all_waiters=everyone, keep=keep)
        if not keep:
            self.known.remove(name)

    @rule(data=st.data(), how=st.sampled_from(["release", "expire", "lose"]))
    def end(self, data: st.DataObject, how: str) -> None:
        if self.ledger.active:
            getattr(self.ledger, how)(data.draw(st.sampled_from(sorted(self.ledger.active))))

    @rule(target=resetting, data=st.data())
    def reuse(self, data: st.DataObject) -> object:
        if not self.ledger.active:
            return multiple()
        old = data.draw(st.sampled_from(sorted(self.ledger.active)))
        name = self.ledger.reuse(old)
        self.known.remove(old)
        assert name not in self.known | self.granted, "a name was given twice"
        self.known.add(name)
        return name

    @rule(name=consumes(resetting), how=st.sampled_from(["done", "keep", "drop"]))
    def end_reset(self, name: str, how: str) -> None:
        if how == "done":
            self.ledger.reset_done(name)
        else:
            self.ledger.reset_failed(name, keep=how == "keep")

    @rule(target=forking, count=st.integers(1, 3))
    def fork(self, count: int) -> object:
        ledger = self.ledger
        # What is on its way ends in its bundle; here it is not withdrawn.
        under_way = ledger.starting_count
        try:
            leaving = giving_way(ledger, count)
        except PoolFull:
            assert count > ledger.bounds.size_limit - ledger.size
            assert count > ledger.bounds.size_limit - ledger.size + len(self.idle) - ledger.waiting.sandboxes
            return multiple()
        if not self.idle.issuperset(leaving):
            assert under_way
            return multiple()
        for name in leaving:
            if name in ledger.quarantined:
                ledger.release_quarantined(name)
            else:
                ledger.retire(name)
        forks = ledger.fork(count)
        self.known.update(forks)
        return multiple(*forks)

    @property
    def idle(self) -> set[str]:
        return {*self.ledger.warm, *self.ledger.doubted, *self.ledger.quarantined}

    @rule(name=consumes(forking), well=st.booleans())
    def end_fork(self, name: str, well: bool) -> None:
        if well:
            self.ledger.forked(name)
        else:
            self.ledger.fork_failed(name)

    @rule(data=st.data())
    def lose_warm(self, data: st.DataObject) -> None:
        if ready := sorted([*self.ledger.warm, *self.ledger.doubted]):
            self.ledger.lose(data.draw(st.sampled_from(ready)))

    @rule(data=st.data())
    def doubt(self, data: st.DataObject) -> None:
        if self.ledger.warm:
            self.ledger.doubt(data.draw(st.sampled_from(sorted(self.ledger.warm))))

    @rule(data=st.data())
    def trust(self, data: st.DataObject) -> None:
        if self.ledger.doubted:
            self.ledger.trust(data.draw(st.sampled_from(sorted(self.ledger.doubted))))

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        if ready := sorted([*self.ledger.warm, *self.ledger.doubted]):
            self.ledger.quarantine(data.draw(st.sampled_from(ready)))

    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        if self.ledger.quarantined:
            self.ledger.release_quarantined(data.draw(st.sampled_from(sorted(self.ledger.quarantined))))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.ledger.deleting:
            name = data.draw(st.sampled_from(sorted(self.ledger.deleting)))
            self.ledger.deleted(name)
            self.known.remove(name)

    @rule(warm=st.integers(0, 8))
    def retarget(self, warm: int) -> None:
        self.ledger.bounds.warm_target = warm
        for name in self.ledger.surplus():
            self.ledger.retire(name)

    @invariant()
    def sound(self) -> None:
        self.ledger.check()
        # Forks wait until those that give way to them are gone.
        assert self.ledger.size - len(self.ledger.deleting) <= self.ledger.bounds.size_limit
        assert len(self.ledger.starting) <= self.ledger.bounds.start_limit

    @invariant()
    def nothing_is_lost(self) -> None:
        ledger = self.ledger
        on_their_way = {
            *ledger.starting,
            *ledger.backing_off,
            *ledger.resumable,
            *ledger.forking,
            *ledger.resetting,
        }
        ready, kept = {*ledger.warm, *ledger.doubted}, {*ledger.quarantined}
        assert self.known == on_their_way | ready | kept | {*ledger.active, *ledger.deleting}

    def teardown(self) -> None:
        """When leases end and starts succeed, whoever waits is granted: soon, and in the order foretold."""
        ledger, order = self.ledger, list[int]()
        foretold = sorted(ledger.waiting, key=lambda ticket: ledger.waiting.before(ticket)[0])
        for _ in range(6 * len(foretold)):
            for name in sorted(ledger.active):
                ledger.release(name)
            for name in [*ledger.forking]:
                ledger.fork_withdrawn(name)
            for name in [*ledger.deleting]:
                ledger.deleted(name)
            for name in [*ledger.backing_off]:
                ledger.attempt_due(name)
            for name in [*ledger.resetting]:
                ledger.reset_done(name)
            for name in [*ledger.doubted]:
                ledger.trust(name)
            order += [ticket for ticket, _ in ledger.plan().grant]
            for name in [*ledger.starting]:
                ledger.start_succeeded(name)
        assert order == foretold
        ledger.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
