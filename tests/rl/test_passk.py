"""pass@k against counting every choice of k attempts, and intervals against known ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.passk import Tally, estimate, pass_at_k, wilson


@given(st.integers(1, 9), st.data())
def test_it_is_the_share_of_choices_with_a_solution(count: int, data: st.DataObject) -> None:
    solved = data.draw(st.integers(0, count))
    k = data.draw(st.integers(1, count))
    outcomes = [True] * solved + [False] * (count - solved)
    choices = [any(choice) for choice in itertools.combinations(outcomes, k)]
    assert pass_at_k(Tally(count, solved), k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_it_is_unbiased_where_the_plug_in_is_not() -> None:
    """Ten attempts at p = 0.2: the mean over many runs is 1 - 0.8^5; 1 - (1 - c/n)^5 is off by 0.02."""
    solved = np.random.default_rng(0).binomial(10, 0.2, 20_000)
    truth = 1 - 0.8**5
    assert np.mean([pass_at_k(Tally(10, int(c)), 5) for c in solved]) == pytest.approx(truth, abs=0.006)
    assert abs(np.mean(1 - (1 - solved / 10) ** 5) - truth) > 0.015


def test_large_numbers_stay_finite() -> None:
    assert pass_at_k(Tally(100_000, 1), 1) == pytest.approx(1e-5)
    assert pass_at_k(Tally(100_000, 50_000), 1000) == 1.0


@pytest.mark.parametrize(
    ("tally", "k"), [(Tally(3, 1), 4), (Tally(3, 1), 0), (Tally(3, 4), 1), (Tally(0, 0), 1)]
)
def test_what_cannot_be_said_is_refused(tally: Tally, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(tally, k)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for run in range(60):
        skills = rng.beta(1, 2, 80)
        made = estimate([Tally(4, int(rng.binomial(4, p))) for p in skills], 1, seed=run)
        assert made is not None
        assert made.method == "bootstrap"
        covered += made.low <= 1 / 3 <= made.high
    assert covered >= 51


def test_where_all_tasks_agree_the_interval_is_wilsons() -> None:
    made = estimate([Tally(2, 0)] * 10, 2)
    assert made is not None
    assert (made.method, made.value, made.low) == ("wilson", 0.0, 0.0)
    assert made.high == pytest.approx(0.2775, abs=1e-4)
    assert wilson(0.5, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)


def test_tasks_with_too_few_verdicts_are_left_out_and_counted() -> None:
    made = estimate([Tally(5, 5), Tally(2, 0), Tally(0, 0)], 3)
    assert made is not None
    assert (made.tasks, made.left_out, made.value) == (1, 2, 1.0)
    assert estimate([Tally(1, 1)], 2) is None
