"""The ledger under every order of events: its invariants hold after each transition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from sandboxd.errors import InvalidRequest, PoolFull, QueueFull
from sandboxd.ledger import Bounds, Ledger
from sandboxd.queueing import Claim


def make(warm: int = 2, size: int = 10, starts: int = 4, waiting: int = 5) -> Ledger:
    names = (f"s{n}" for n in itertools.count())
    return Ledger(Bounds(warm, size, starts, waiting, {"b": 3}), new_id=lambda: next(names))


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


def test_no_more_begin_or_go_on_than_there_is_room_for() -> None:
    ledger = make(warm=5, starts=4)
    plan = ledger.plan(room=1)
    assert (len(plan.start), plan.held_back) == (1, 3)
    ledger.attempt_failed(plan.start[0])
    ledger.attempt_due(plan.start[0])
    assert ledger.plan(room=0).held_back == 4
    plan = ledger.plan(room=2)
    assert (len(plan.resume), len(plan.start), plan.held_back) == (1, 1, 2)
    assert ledger.plan(may_fill=False).held_back == 0


def test_a_start_that_fails_for_good_tells_one_waiter_or_all() -> None:
    ledger = make(warm=0)
    tickets = [ledger.enqueue() for _ in range(3)]
    started = ledger.plan().start
    assert ledger.start_failed(started[0], all_waiters=False) == (tickets[0],)
    assert ledger.start_failed(started[1], all_waiters=True) == (tickets[1], tickets[2])


def test_a_gang_outlives_one_failed_start_but_not_two_in_a_row() -> None:
    ledger = make(warm=0, starts=2)
    gang = ledger.enqueue(Claim(count=4))
    first, second = ledger.plan().start
    assert ledger.start_failed(first, all_waiters=False) == ()
    ledger.start_succeeded(second)
    third, fourth = ledger.plan().start
    assert ledger.start_failed(third, all_waiters=False) == ()
    assert ledger.start_failed(fourth, all_waiters=False) == (gang,)


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


def test_a_full_queue_has_room_for_whoever_goes_before_others() -> None:
    ledger = make(waiting=2)
    first, second = ledger.enqueue(), ledger.enqueue()
    assert ledger.displace(Claim()) is None
    with pytest.raises(QueueFull):
        ledger.enqueue()
    assert ledger.displace(Claim(tenant="b")) == second
    other = ledger.enqueue(Claim(tenant="b"))
    assert ledger.displace(Claim(priority=1, count=11)) is None
    assert ledger.displace(Claim(priority=1)) in (first, other)
    ledger.enqueue(Claim(priority=1))
    ledger.check()


def test_a_gang_is_granted_all_or_nothing_and_nobody_passes_it() -> None:
    ledger = make(warm=0, size=4, starts=4)
    gang, single = ledger.enqueue(Claim(count=3)), ledger.enqueue(Claim(tenant="b"))
    started = ledger.plan().start
    assert len(started) == 4
    for name in started[:2]:
        ledger.start_succeeded(name)
        assert ledger.plan().grant == ()
        assert ledger.surplus() == ()
    ledger.start_succeeded(started[2])
    assert ledger.plan().grant == ((gang, started[:3]),)
    ledger.start_succeeded(started[3])
    assert ledger.plan().grant == ((single, (started[3],)),)


def test_what_gathered_for_a_gang_that_leaves_is_for_those_behind_it() -> None:
    ledger = make(warm=0, size=4, starts=4)
    gang, single = ledger.enqueue(Claim(count=4)), ledger.enqueue()
    started = ledger.plan().start
    for name in started[:3]:
        ledger.start_succeeded(name)
    assert ledger.plan().grant == ()
    ledger.withdraw(gang)
    assert ledger.plan().grant == ((single, (started[0],)),)
    assert len(ledger.surplus()) == 2


def test_a_gang_that_the_pool_can_never_hold_is_refused() -> None:
    ledger = make(size=10)
    with pytest.raises(
        InvalidRequest, match="11 sandboxes at once are more than the pool's size_limit of 10"
    ):
        ledger.enqueue(Claim(count=11))
    gang = ledger.enqueue(Claim(count=10))
    assert ledger.unmeetable() == ()
    ledger.bounds.size_limit = 9
    assert ledger.unmeetable() == (gang,)


def test_gangs_and_singles_all_end_while_sandboxes_come_and_go() -> None:
    """A pool of 8: gangs of 8 wait until all of it is theirs, among singles without end; nobody starves."""
    ledger = make(warm=0, size=8, starts=8, waiting=1000)
    gangs = [ledger.enqueue(Claim(count=8, tenant="large")) for _ in range(5)]
    singles, granted = [ledger.enqueue(Claim(tenant="small"))], dict[int, int]()
    for turn in range(400):
        singles.append(ledger.enqueue(Claim(tenant="small")))
        plan = ledger.plan()
        for name in plan.start:
            ledger.start_succeeded(name)
        granted.update((ticket, turn) for ticket, _ in plan.grant)
        for name in sorted(ledger.active)[:4]:
            ledger.release(name)
        for name in list(ledger.deleting):
            ledger.deleted(name)
        ledger.check()
    assert set(gangs) <= set(granted)
    # 16 requests of one sandbox for each gang's turn, and two turns to gather: nobody stands for ever.
    assert max(granted[gang] for gang in gangs) < 100
    assert set(singles[:200]) <= set(granted)


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

    @rule(name=consumes(starting), everyone=st.booleans())
    def fail_for_good(self, name: str, everyone: bool) -> None:
        self.ledger.start_failed(name, all_waiters=everyone)
        self.known.remove(name)

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
        forks = self.ledger.fork(count)
        self.known.update(forks)
        return multiple(*forks)

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
        assert self.ledger.size <= self.ledger.bounds.size_limit
        assert len(self.ledger.starting) <= self.ledger.bounds.start_limit

    @invariant()
    def nothing_is_lost(self) -> None:
        ledger = self.ledger
        on_their_way = {*ledger.starting, *ledger.backing_off, *ledger.resumable, *ledger.forking}
        assert self.known == on_their_way | {*ledger.warm, *ledger.active, *ledger.deleting}

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
            order += [ticket for ticket, _ in ledger.plan().grant]
            for name in [*ledger.starting]:
                ledger.start_succeeded(name)
        assert order == foretold
        ledger.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
