"""The window policy: pure decisions, and the bound that follows from them."""

from __future__ import annotations

import random

import pytest

from rl.staleness import Candidate, WindowPolicy


def candidates(*versions: int) -> list[Candidate]:
    return [Candidate(ticket, version) for ticket, version in enumerate(versions)]


def test_slots_pace_admission() -> None:
    policy = WindowPolicy(bound=1, groups_per_batch=3)
    assert policy.slots == 6
    assert policy.admit(5)
    assert not policy.admit(6)


def test_too_few_groups_make_no_batch() -> None:
    assert WindowPolicy(1, 3).select(candidates(0, 0), [], 0) is None


def test_the_oldest_are_trained_first() -> None:
    assert WindowPolicy(1, 2).select(candidates(4, 3, 4, 3), [], 4) == (1, 3)


def test_a_step_waits_for_a_running_group_that_would_be_too_old_after_it() -> None:
    policy = WindowPolicy(1, 1)
    assert policy.select(candidates(3), [Candidate(9, 2)], 3) is None
    assert policy.select(candidates(3), [Candidate(9, 3)], 3) == (0,)


def test_a_step_waits_when_too_many_running_groups_would_fall_due_together() -> None:
    """Bound 3, one group a step: two that must be trained within the next step cannot both be."""
    policy = WindowPolicy(3, 1)
    assert policy.select(candidates(5), [Candidate(8, 3), Candidate(9, 4)], 5) == (0,)
    assert policy.select(candidates(5), [Candidate(8, 3), Candidate(9, 3)], 5) is None


def test_bound_zero_waits_for_every_running_group() -> None:
    assert WindowPolicy(0, 1).select(candidates(3), [Candidate(9, 3)], 3) is None


def test_what_is_too_old_is_evicted_and_the_bound_itself_is_not() -> None:
    assert WindowPolicy(1, 2).evict(candidates(1, 2, 3), 3) == (0,)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_ever_evicted_whatever_order_groups_finish_in(bound: int, seed: int) -> None:
    """Plays admission, finishing and training in random order; some groups are dropped and replaced."""
    rng = random.Random(seed)
    policy = WindowPolicy(bound, groups_per_batch=3)
    running: dict[int, int] = {}
    ready: dict[int, int] = {}
    version = tickets = 0
    training: int = 0

    def as_candidates(groups: dict[int, int]) -> list[Candidate]:
        return [Candidate(ticket, oldest) for ticket, oldest in groups.items()]

    while version < 30:
        choice = rng.random()
        if choice < 0.4 and policy.admit(len(running) + len(ready) + training):
            running[tickets] = version
            tickets += 1
        elif choice < 0.8 and running:
            ticket = rng.choice(list(running))
            oldest = running.pop(ticket)
            if rng.random() > 0.3:
                ready[ticket] = oldest
        elif training:
            version, training = version + 1, 0
        else:
            assert policy.evict(as_candidates(ready), version) == ()
            chosen = policy.select(as_candidates(ready), as_candidates(running), version)
            if chosen is not None:
                assert all(version - ready[ticket] <= bound for ticket in chosen)
                for ticket in chosen:
                    del ready[ticket]
                training = len(chosen)
