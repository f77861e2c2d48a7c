"""The ledger, step by step."""

from __future__ import annotations

import itertools

import pytest

from sandboxd.errors import InvalidRequest, PoolFull, QueueFull
from sandboxd.ledger import Bounds, Ledger
from sandboxd.making_room import giving_way
from sandboxd.queueing import Claim


def make(warm: int = 2, size: int = 10, starts: int = 4, waiting: int = 5, quarantine: int = 0) -> Ledger:
    names = (f"s{n}" for n in itertools.count())
    return Ledger(Bounds(warm, size, starts, waiting, {"b": 3}, quarantine), new_id=lambda: next(names))


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


def forked(ledger: Ledger, count: int) -> tuple[str, ...]:
    """Forks that nothing has to give way to."""
    assert giving_way(ledger, count) == ()
    return ledger.fork(count)


def test_forks_pass_the_queue_but_not_the_size() -> None:
    ledger = make(warm=0, size=4)
    ledger.enqueue()
    forks = forked(ledger, 3)
    with pytest.raises(
        PoolFull, match="2 forks do not fit: the pool may have 4 sandboxes, 3 are leased, and"
    ):
        giving_way(ledger, 2)
    assert len(ledger.plan().start) == 1
    ledger.forked(forks[0])
    ledger.fork_failed(forks[1])
    assert (ledger.active, ledger.forking, ledger.totals.acquired) == ({forks[0]}, {forks[2]}, 1)
    ledger.check()


def filled(ledger: Ledger) -> tuple[str, ...]:
    """Starts what it wants, all at once; returns the names."""
    started = ledger.plan().start
    for name in started:
        ledger.start_succeeded(name)
    return started


def test_what_nobody_holds_or_waits_for_gives_way_to_forks() -> None:
    ledger = make(warm=4, size=5, starts=4, quarantine=1)
    kept, doubted, old, new = filled(ledger)
    (held,) = ledger.fork(1)
    ledger.forked(held)
    ledger.quarantine(kept)
    ledger.doubt(doubted)
    assert giving_way(ledger, 4) == (kept, doubted, new, old)
    assert giving_way(ledger, 3) == (kept, doubted, new)
    with pytest.raises(PoolFull, match="1 is leased; release some") as raised:
        giving_way(ledger, 5)
    assert raised.value.metadata == {"room": "4"}
    ledger.enqueue(Claim(3))
    ledger.plan()
    with pytest.raises(PoolFull, match="1 is leased, and callers wait for 3; release some") as raised:
        giving_way(ledger, 2)
    assert raised.value.metadata == {"room": "1"}


def test_those_that_are_ending_give_way_to_forks_once() -> None:
    ledger = make(warm=0, size=3)
    held = ledger.fork(3)
    for name in held:
        ledger.forked(name)
    ledger.release(held[0])
    ledger.release(held[1])
    assert giving_way(ledger, 2) == ()
    ledger.fork(1)
    assert giving_way(ledger, 1) == ()
    with pytest.raises(PoolFull):
        giving_way(ledger, 2)
    ledger.deleted(held[0])
    assert giving_way(ledger, 1) == ()
    with pytest.raises(PoolFull):
        giving_way(ledger, 2)


def test_a_doubted_sandbox_counts_as_warm_but_is_granted_to_nobody() -> None:
    ledger = make(warm=2, size=2)
    first, second = filled(ledger)
    ledger.doubt(first)
    ledger.doubt(second)
    assert ledger.plan().start == ()
    ticket = ledger.enqueue()
    assert ledger.plan().grant == ()
    ledger.trust(second)
    assert ledger.plan().grant == ((ticket, (second,)),)
    assert ledger.ready_count == 1
    ledger.lose(first)
    assert ledger.totals.unhealthy == 1
    assert ledger.totals.lost == 0
    ledger.check()


def test_what_is_surplus_is_first_what_has_not_answered() -> None:
    ledger = make(warm=3)
    first, second, third = filled(ledger)
    ledger.doubt(second)
    ledger.bounds.warm_target = 1
    assert ledger.surplus() == (second, third)
    ledger.retire(second)
    ledger.retire(third)
    assert (list(ledger.warm), ledger.totals.unhealthy) == ([first], 0)


def test_a_used_sandbox_keeps_its_place_and_loses_its_name() -> None:
    ledger = make(warm=1, size=1)
    (first,) = filled(ledger)
    ledger.enqueue()
    ledger.plan()
    assert ledger.may_reuse()
    second = ledger.reuse(first)
    assert second != first
    assert (ledger.size, ledger.starting_count, ledger.totals.released) == (1, 1, 1)
    assert ledger.plan().start == ()
    ticket = ledger.enqueue()
    ledger.reset_done(second)
    assert ledger.plan().grant == ((ticket, (second,)),)
    third = ledger.reuse(second)
    ledger.reset_failed(third, keep=False)
    assert (ledger.deleting, ledger.totals.reused) == ({third}, 1)
    ledger.check()


def test_nothing_is_reset_that_nobody_wants() -> None:
    ledger = make(warm=1, size=3)
    filled(ledger)
    ledger.enqueue()
    ledger.plan()
    filled(ledger)
    assert not ledger.may_reuse()
    ledger.bounds.warm_target = 2
    assert ledger.may_reuse()


def test_a_quarantine_holds_the_newest_failures_and_gives_way_to_callers() -> None:
    ledger = make(warm=0, size=4, starts=4, quarantine=2)
    for _ in range(4):
        ledger.enqueue()
    names = ledger.plan().start
    for name in names[:3]:
        ledger.start_failed(name, all_waiters=True, keep=True)
    assert ledger.plan().evict == (names[0],)
    assert ledger.size == 4
    ledger.start_succeeded(names[3])
    for _ in range(3):
        ledger.enqueue()
    # One is warm and one is being destroyed: only the third caller needs a place.
    assert ledger.plan().evict == (names[1],)
    assert ledger.plan().evict == ()
    assert list(ledger.quarantined) == [names[2]]
    ledger.release_quarantined(names[2])
    for name in names[:3]:
        ledger.deleted(name)
    ledger.check()
