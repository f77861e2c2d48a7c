"""The ledger under every order of events: its invariants hold after each transition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from sandboxd.errors import PoolFull, QueueFull
from sandboxd.ledger import Bounds, Ledger


def make(warm: int = 2, size: int = 10, starts: int = 4, waiting: int = 5) -> Ledger:
    names = (f"s{n}" for n in itertools.count())
    return Ledger(Bounds(warm, size, starts, waiting), new_id=lambda: next(names))


def test_fills_to_the_target_and_no_further() -> None:
    ledger = make(warm=3, starts=2)
    first = ledger.plan()
    assert len(first.start) == 2
    for name in first.start:
        ledger.start_succeeded(name)
    assert len(ledger.plan().start) == 1
    assert ledger.plan().start == ()


def test_grants_in_the_order_of_arrival_and_flips_at_once() -> None:
    ledger = make(warm=0)
    tickets = [ledger.enqueue() for _ in range(3)]
    started = ledger.plan().start
    assert len(started) == 3
    ledger.start_succeeded(started[1])
    assert ledger.plan().grant == ((tickets[0], (started[1],)),)
    assert ledger.active == {started[1]}
    assert ledger.plan().grant == ()


def test_starts_for_waiters_beyond_the_target_but_not_beyond_the_limit() -> None:
    ledger = make(warm=1, size=3, starts=10)
    for _ in range(5):
        ledger.enqueue()
    assert len(ledger.plan().start) == 3


def test_a_backing_off_start_frees_its_slot_and_keeps_its_place() -> None:
    ledger = make(warm=2, size=2, starts=1)
    (first,) = ledger.plan().start
    ledger.attempt_failed(first)
    (second,) = ledger.plan().start
    assert ledger.plan().start == ()
    ledger.attempt_due(first)
    assert ledger.plan().resume == ()
    ledger.start_succeeded(second)
    assert ledger.plan().resume == (first,)


def test_a_start_that_fails_for_good_tells_one_waiter_or_all() -> None:
    ledger = make(warm=0)
    tickets = [ledger.enqueue() for _ in range(3)]
    started = ledger.plan().start
    assert ledger.start_failed(started[0], all_waiters=False) == (tickets[0],)
    assert ledger.start_failed(started[1], all_waiters=True) == (tickets[1], tickets[2])


def test_a_degraded_pool_probes_with_one_start_at_a_time() -> None:
    ledger = make(warm=3, starts=3)
    started = ledger.plan().start
    for name in started:
        ledger.start_failed(name, all_waiters=False)
    assert ledger.plan(may_fill=False).start == ()
    (probe,) = ledger.plan().start
    ledger.start_succeeded(probe)
    assert len(ledger.plan().start) == 2


def test_the_queue_has_an_end() -> None:
    ledger = make(waiting=2)
    ledger.enqueue()
    ledger.enqueue()
    with pytest.raises(QueueFull, match="2 callers wait already") as raised:
        ledger.enqueue()
    assert raised.value.retry_after is not None


def test_forks_pass_the_queue_but_not_the_size() -> None:
    ledger = make(warm=0, size=4)
    ledger.enqueue()
    forks = ledger.fork(3)
    with pytest.raises(PoolFull, match="2 forks do not fit: the pool may have 4 sandboxes and has 3"):
        ledger.fork(2)
    assert len(ledger.plan().start) == 1
    ledger.forked(forks[0])
    ledger.fork_failed(forks[1])
    assert (ledger.active, ledger.forking, ledger.totals.acquired) == ({forks[0]}, {forks[2]}, 1)
    ledger.check()


class AnyOrder(RuleBasedStateMachine):
    """Drives a ledger by random events, as its pool might see them."""

    starting = Bundle("starting")
    backing_off = Bundle("backing_off")
    forking = Bundle("forking")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = make(warm=3, size=8, starts=3, waiting=6)
        self.granted: set[str] = set()

    @rule(target=starting, may_fill=st.booleans())
    def plan(self, may_fill: bool) -> object:
        plan = self.ledger.plan(may_fill=may_fill)
        for name in itertools.chain.from_iterable(names for _, names in plan.grant):
            assert name not in self.granted, "one sandbox was granted twice"
            self.granted.add(name)
        return multiple(*plan.start, *plan.resume)

    @rule()
    def enqueue(self) -> None:
        if len(self.ledger.waiting) < self.ledger.bounds.waiting_limit:
            self.ledger.enqueue()

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

    @rule(name=consumes(starting), everyone=st.booleans())
    def fail_for_good(self, name: str, everyone: bool) -> None:
        self.ledger.start_failed(name, all_waiters=everyone)

    @rule(data=st.data(), how=st.sampled_from(["release", "expire", "lose"]))
    def end(self, data: st.DataObject, how: str) -> None:
        if self.ledger.active:
            getattr(self.ledger, how)(data.draw(st.sampled_from(sorted(self.ledger.active))))

    @rule(target=forking, count=st.integers(1, 3))
    def fork(self, count: int) -> object:
        if count > self.ledger.bounds.size_limit - self.ledger.size:
            with pytest.raises(PoolFull):
                self.ledger.fork(count)
            return multiple()
        return multiple(*self.ledger.fork(count))

    @rule(name=consumes(forking), well=st.booleans())
    def end_fork(self, name: str, well: bool) -> None:
        if well:
            self.ledger.forked(name)
        else:
            self.ledger.fork_failed(name)

    @rule(data=st.data())
    def lose_warm(self, data: st.DataObject) -> None:
        if self.ledger.warm:
            self.ledger.lose(data.draw(st.sampled_from(sorted(self.ledger.warm))))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.ledger.deleting:
            self.ledger.deleted(data.draw(st.sampled_from(sorted(self.ledger.deleting))))

    @rule(warm=st.integers(0, 8))
    def retarget(self, warm: int) -> None:
        self.ledger.bounds.warm_target = warm
        for name in self.ledger.surplus():
            self.ledger.retire(name)

    @invariant()
    def sound(self) -> None:
        self.ledger.check()
        assert self.ledger.size <= self.ledger.bounds.size_limit
        assert len(self.ledger.starting) <= self.ledger.bounds.start_limit


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
