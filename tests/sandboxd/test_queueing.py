"""The order of waiting: priorities, shares, arrival, gangs; and that what it says of positions comes true."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sandboxd.queueing import Claim, Queue
from sandboxd.rates import MEMORY_SECONDS, GrantRate

TENANTS = ("a", "b", "c")
WEIGHTS = {"a": 1, "b": 2, "c": 5}


def filled(claims: Iterable[Claim], weights: dict[str, int] | None = None) -> Queue:
    queue = Queue(weights)
    for ticket, claim in enumerate(claims):
        queue.add(ticket, claim)
    return queue


def served(queue: Queue) -> list[int]:
    return [queue.serve() for _ in range(len(queue))]


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    queue = filled(Claim(count=1 + n % 3) for n in range(20))
    queue.remove(7)
    assert served(queue) == [n for n in range(20) if n != 7]
    assert queue.head() is None


def test_a_higher_priority_goes_first_whenever_it_comes() -> None:
    queue = filled([Claim(priority=0), Claim(priority=-1), Claim(priority=3), Claim(priority=0)])
    assert queue.head() == 2
    queue.add(4, Claim(priority=5, tenant="b"))
    assert served(queue) == [4, 2, 0, 3, 1]


def test_tenants_share_by_weight() -> None:
    claims = [Claim(tenant=tenant) for _ in range(30) for tenant in ("a", "b")]
    queue = filled(claims, {"b": 2})
    first = Counter(claims[queue.serve()].tenant for _ in range(30))
    assert first == {"a": 10, "b": 20}


def test_a_gang_weighs_as_many_as_it_wants() -> None:
    claims = [Claim(count=4, tenant="a")] * 10 + [Claim(tenant="b")] * 40
    queue, given_to = filled(claims), Counter[str]()
    while given_to["a"] < 20:
        claim = claims[queue.serve()]
        given_to[claim.tenant] += claim.count
    assert abs(given_to["a"] - given_to["b"]) <= 4 + 1


def test_a_tenant_that_comes_late_owes_nothing_and_is_owed_nothing() -> None:
    claims = [Claim(tenant="a")] * 100
    queue = filled(claims)
    for _ in range(50):
        queue.serve()
    for ticket in range(100, 110):
        queue.add(ticket, Claim(tenant="b"))
    order = [queue.serve() for _ in range(20)]
    assert len([ticket for ticket in order if ticket >= 100]) == 10
    assert order != sorted(order)


def test_who_leaves_costs_its_tenant_nothing() -> None:
    queue = filled([Claim(count=8, tenant="a"), Claim(tenant="a"), Claim(tenant="b"), Claim(tenant="b")])
    queue.remove(0)
    assert served(queue) == [1, 2, 3]


def test_nobody_of_its_priority_passes_a_gang_at_the_head() -> None:
    """What holds a reservation together: whoever comes, the head stays until it is served or leaves."""
    queue = filled([Claim(tenant="a"), Claim(tenant="a"), Claim(count=50, tenant="a")])
    assert [queue.serve(), queue.serve(), queue.head()] == [0, 1, 2]
    for ticket in range(10, 200):
        queue.add(ticket, Claim(tenant=f"new-{ticket}"))
        assert queue.head() == 2
    queue.add(500, Claim(priority=1))
    assert queue.head() == 500


def test_a_gang_that_became_the_head_because_another_left_stays_it() -> None:
    queue = filled([Claim(tenant="a"), Claim(count=9, tenant="a"), Claim(tenant="b")])
    assert queue.serve() == 0
    queue.remove(2)
    assert queue.head() == 1
    queue.add(3, Claim(tenant="c"))
    assert queue.head() == 1


@pytest.mark.parametrize("count", [1, 16])
def test_newcomers_without_end_starve_nobody(count: int) -> None:
    """A tenant with work behind it would wait for ever if each new name began before it."""
    claims = [Claim(tenant="old")] * 20 + [Claim(count=count, tenant="old")]
    queue, last = filled(claims), len(claims) - 1
    queue.add(50, Claim(tenant="new-50"))
    for ticket in itertools.count(100):
        queue.add(ticket, Claim(tenant=f"new-{ticket}"))
        if queue.serve() == last:
            break
        # The system's time moves on by 1 with as many grants as tenants wait: at most 22 here, 21 times.
        assert ticket < 100 + 22 * 21


def test_the_last_of_the_order_is_whoever_has_most_before_it() -> None:
    queue = filled([*[Claim(tenant="a")] * 5, Claim(tenant="b"), Claim(priority=2)])
    assert queue.last_behind(Claim(tenant="a")) is None
    assert queue.last_behind(Claim(tenant="b")) == 4
    assert queue.last_behind(Claim(tenant="c")) == 4
    assert queue.last_behind(Claim(priority=-1)) is None
    assert queue.last_behind(Claim(priority=1)) == 4
    assert Queue().last_behind(Claim()) is None


def test_names_that_come_and_leave_behind_a_gang_leave_nothing() -> None:
    queue = filled([Claim(count=9)])
    for ticket in range(1, 2000):
        queue.add(ticket, Claim(tenant=f"t{ticket}"))
        queue.remove(ticket)
        assert queue.head() == 0
    (band,) = queue._bands.values()
    assert len(band.lanes) == 1
    assert len(band._heap) < 100


def test_ten_thousand_waiters_come_look_and_leave() -> None:
    """Anything linear in the waiters, done by each of them, would take minutes."""
    tenants = [f"t{n}" for n in range(8)]
    claims = [Claim(count=1 + n % 5, tenant=tenants[n % 8], priority=n % 3) for n in range(10_000)]
    queue = filled(claims, {"t1": 7})
    assert sum(queue.before(ticket)[0] for ticket in range(10_000)) == 10_000 * 9_999 // 2
    for ticket in range(0, 10_000, 2):
        queue.remove(ticket)
    assert len(served(queue)) == 5_000


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 9)), min_size=1, max_size=80),
)
def test_shares_keep_within_one_request_of_each(counts: list[tuple[str, int]]) -> None:
    """While two tenants wait: |Wa/wa - Wb/wb| ≤ max a/wa + max b/wb, from any moment to any other."""
    claims = [Claim(count=count, tenant=tenant) for tenant, count in counts]
    queue = filled(claims, WEIGHTS)
    left = Counter(claim.tenant for claim in claims)
    largest = {t: max((c.count for c in claims if c.tenant == t), default=0) / WEIGHTS[t] for t in TENANTS}
    for a, b in itertools.combinations(left, 2):
        copy, waiting, difference = filled(claims, WEIGHTS), Counter(left), [0.0]
        while waiting[a] and waiting[b]:
            claim = claims[copy.serve()]
            waiting[claim.tenant] -= 1
            sign = {a: 1, b: -1}.get(claim.tenant, 0)
            difference.append(difference[-1] + sign * claim.count / WEIGHTS[claim.tenant])
        assert max(difference) - min(difference) <= largest[a] + largest[b] + 1e-6
    assert len(served(queue)) == len(claims)


class AnyQueue(RuleBasedStateMachine):
    """Waiters come, leave and are served in any order; at each moment all positions are what comes true."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(WEIGHTS)
        self.tickets = itertools.count()

    @rule(
        count=st.integers(1, 6),
        tenant=st.sampled_from([*TENANTS, "d"]),
        priority=st.sampled_from([-1, 0, 0, 0, 2]),
    )
    def come(self, count: int, tenant: str, priority: int) -> None:
        self.queue.add(next(self.tickets), Claim(count, tenant, priority))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.queue:
            self.queue.remove(data.draw(st.sampled_from(sorted(self.queue))))

    @rule()
    def serve(self) -> None:
        if self.queue:
            head = self.queue.head()
            assert self.queue.before(head or 0) == (0, 0)
            assert self.queue.serve() == head

    @invariant()
    def sound(self) -> None:
        self.queue.check()

    @invariant()
    def tenants_are_served_in_the_order_of_arrival(self) -> None:
        positions = {ticket: self.queue.before(ticket)[0] for ticket in self.queue}
        assert sorted(positions.values()) == list(range(len(positions)))
        last: dict[tuple[int, str], int] = {}
        for ticket, position in positions.items():
            claim = self.queue[ticket]
            assert last.get((claim.priority, claim.tenant), -1) < position
            last[claim.priority, claim.tenant] = position

    def teardown(self) -> None:
        expected = sorted(self.queue, key=lambda ticket: self.queue.before(ticket)[0])
        wanted = [self.queue.before(ticket)[1] for ticket in expected]
        counts = [self.queue[ticket].count for ticket in expected]
        assert wanted == [sum(counts[:n]) for n in range(len(counts))]
        priorities = [self.queue[ticket].priority for ticket in expected]
        assert priorities == sorted(priorities, reverse=True)
        if expected:
            lowest = Claim(tenant="d", priority=self.queue[expected[-1]].priority + 1)
            assert self.queue.last_behind(lowest) == expected[-1]
        assert served(self.queue) == expected


TestAnyQueue = AnyQueue.TestCase
TestAnyQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_rate_is_unknown_before_somebody_waited() -> None:
    rate = GrantRate()
    rate.observe(0.0, 50, waiting=False)
    assert rate.per_second(10.0) is None
    rate.observe(10.0, 0, waiting=True)
    assert rate.per_second(15.0) is None


def test_a_burst_of_grants_is_not_taken_for_a_rate() -> None:
    rate = GrantRate()
    rate.observe(0.0, 0, waiting=True)
    rate.observe(0.001, 50, waiting=True)
    assert rate.per_second(0.5) is None
    assert rate.per_second(10.0) == pytest.approx(5.0, rel=0.1)


def test_a_rate_is_of_the_time_when_somebody_waits() -> None:
    rate = GrantRate()
    rate.observe(0.0, 0, waiting=True)
    for second in range(1, 11):
        rate.observe(float(second), 4, waiting=second < 10)
    assert rate.per_second(1000.0) == pytest.approx(4.0, rel=0.05)
    rate.observe(1000.0, 0, waiting=True)
    assert rate.per_second(1000.0) == pytest.approx(4.0, rel=0.05)
    assert (rate.per_second(1000.0 + 5 * MEMORY_SECONDS) or 0.0) < 0.1


def test_a_rate_follows_what_changes() -> None:
    rate = GrantRate()
    rate.observe(0.0, 0, waiting=True)
    for second in range(1, 600):
        rate.observe(float(second), 10 if second < 300 else 1, waiting=True)
    assert rate.per_second(599.0) == pytest.approx(1.0, rel=0.1)
