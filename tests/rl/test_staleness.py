"""The queue policies: pure decisions, and the bound that follows from them."""

from __future__ import annotations

import random

import pytest

from rl.policies import DropLate, InOrder, PolicyName, QueueRules, Windowed, build_policy
from rl.staleness import Candidate, QueuePolicy, Slots, Standing


def candidates(*versions: int) -> list[Candidate]:
    return [Candidate(ticket, version) for ticket, version in enumerate(versions)]


def windowed(bound: int, size: int, spare: int = 0) -> Windowed:
    return Windowed(Slots(bound, size, spare))


def ready(*versions: int) -> Standing:
    return Standing(ready=candidates(*versions))


def beside(first: Candidate, *running: Candidate) -> Standing:
    """One finished group, and some that run."""
    return Standing(running, [first])


def test_slots_pace_admission() -> None:
    slots = Slots(1, 3)
    assert slots.free(ready(*[0] * 5))
    assert not slots.free(ready(*[0] * 6))
    assert slots.free(Standing(ready=candidates(0, 0), held=3))
    assert not slots.free(Standing(ready=candidates(0, 0, 0), held=3))


def test_spare_groups_start_beyond_the_slots_unless_they_would_be_too_old_after_the_step() -> None:
    assert Slots(0, 2, spare=1).free(ready(0, 0))
    assert not Slots(0, 2, spare=1).free(ready(0, 0, 0))
    assert not Slots(0, 2, spare=1).free(Standing(held=2)), "whatever starts now is one version too old"
    assert Slots(1, 2, spare=1).free(Standing(ready=candidates(0, 0), held=2))


@pytest.mark.parametrize("numbers", [(-1, 1, 0), (0, 0, 0), (0, 1, -1)])
def test_slots_that_make_no_sense_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Slots(*numbers)


def test_too_few_groups_make_no_batch() -> None:
    assert windowed(1, 3).select(ready(0, 0), 0) is None


def test_the_oldest_are_trained_first() -> None:
    assert windowed(1, 2).select(ready(4, 3, 4, 3), 4) == (1, 3)


def test_a_step_waits_for_a_running_group_that_would_be_too_old_after_it() -> None:
    first = Candidate(0, 3)
    assert windowed(1, 1).select(beside(first, Candidate(9, 2)), 3) is None
    assert windowed(1, 1).select(beside(first, Candidate(9, 3)), 3) == (0,)


def test_a_spare_group_is_not_waited_for() -> None:
    policy = windowed(1, 1, spare=1)
    assert policy.select(beside(Candidate(0, 3), Candidate(9, 2)), 3) == (0,)
    assert policy.select(beside(Candidate(0, 3), Candidate(8, 2), Candidate(9, 2)), 3) is None
    assert policy.evict(Standing([Candidate(9, 2)], held=1), 4) == (9,)


def test_a_step_waits_when_too_many_running_groups_would_fall_due_together() -> None:
    """Bound 3, one group a step: two that must be trained within the next step cannot both be."""
    policy, first = windowed(3, 1), Candidate(0, 5)
    assert policy.select(beside(first, Candidate(8, 3), Candidate(9, 4)), 5) == (0,)
    assert policy.select(beside(first, Candidate(8, 3), Candidate(9, 3)), 5) is None


def test_bound_zero_waits_for_every_running_group() -> None:
    assert windowed(0, 1).select(beside(Candidate(0, 3), Candidate(9, 3)), 3) is None


@pytest.mark.parametrize("policy", [windowed(1, 2), InOrder(Slots(1, 2)), DropLate(Slots(1, 2))])
def test_what_is_too_old_is_evicted_and_the_bound_itself_is_not(
    policy: QueuePolicy,
) -> None:
    assert policy.evict(ready(1, 2, 3), 3) == (0,)
    assert policy.evict(Standing([Candidate(7, 1)], candidates(2), held=2), 3) == (7,)


def test_in_order_waits_for_the_oldest_however_many_others_are_ready() -> None:
    policy = InOrder(Slots(1, 2))
    assert policy.select(Standing([Candidate(1, 0)], [Candidate(0, 0), *candidates(0, 0)[2:]]), 0) is None
    waiting = Standing([Candidate(1, 0)], [Candidate(n, 0) for n in (0, 2, 3)])
    assert policy.select(waiting, 0) is None
    assert policy.select(Standing([Candidate(3, 0)], [Candidate(n, 0) for n in (2, 1, 0)]), 0) == (0, 1)


def test_drop_late_waits_for_nobody() -> None:
    assert DropLate(Slots(1, 1)).select(beside(Candidate(0, 3), Candidate(9, 2)), 3) == (0,)


def test_drop_late_ends_due_groups_with_enough_verdicts_as_many_as_the_batch_lacks() -> None:
    policy = DropLate(Slots(1, 2), min_samples=3)
    running = [Candidate(5, 2, 3), Candidate(6, 2, 4), Candidate(7, 2, 2), Candidate(8, 3, 8)]
    assert policy.evict(Standing(running, [Candidate(0, 2)]), 3) == (6,)
    assert policy.evict(Standing(running), 3) == (6, 5)
    assert policy.evict(Standing(running, held=2), 3) == (), "while it trains nothing is cut short"
    assert policy.evict(Standing(running, candidates(2, 2)), 3) == ()


@pytest.mark.parametrize("name", ["in_order", "windowed"])
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_ever_evicted_whatever_order_groups_finish_in(
    name: PolicyName, bound: int, seed: int
) -> None:
    """Plays admission, finishing and training in random order; some groups are dropped and replaced."""
    rng = random.Random(seed)
    policy = build_policy(QueueRules(name), bound, groups_per_batch=3)
    running: dict[int, int] = {}
    done: dict[int, int] = {}
    version = tickets = 0
    training: int = 0

    def standing() -> Standing:
        waiting, ready = ([Candidate(*item) for item in held.items()] for held in (running, done))
        return Standing(waiting, ready, training)

    while version < 30:
        choice = rng.random()
        if choice < 0.4 and policy.admit(standing()):
            running[tickets] = version
            tickets += 1
        elif choice < 0.8 and running:
            ticket = rng.choice(list(running))
            oldest = running.pop(ticket)
            if rng.random() > 0.3:
                done[ticket] = oldest
        elif training:
            version, training = version + 1, 0
        else:
            assert policy.evict(standing(), version) == ()
            chosen = policy.select(standing(), version)
            if chosen is not None:
                assert all(version - done[ticket] <= bound for ticket in chosen)
                for ticket in chosen:
                    del done[ticket]
                training = len(chosen)
