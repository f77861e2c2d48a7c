"""Rewards become advantages: scaled or not, shaped or not, and never without a verdict that differs."""

from __future__ import annotations

import numpy as np
import pytest

from rl.advantage import AdvantageRule, group_relative, overlong_penalty, scored_advantages
from rl.types import Episode, Group, Scored, StopReason, Task, Turn, VersionSpan

TASK = Task("k", "sums", 0, "q", "a")
SHAPED = AdvantageRule(overlong_tokens=4, limit_tokens=10)


def group(*members: tuple[float, int]) -> Group:
    """Episodes by reward and number of sampled tokens."""
    episodes = tuple(
        Episode(TASK, (turn(length),), Scored(reward), StopReason.COMPLETED) for reward, length in members
    )
    return Group(TASK, np.array([7], np.int32), episodes)


def turn(length: int) -> Turn:
    none = np.array([], np.int32)
    sampled = np.zeros(length, np.int32)
    return Turn(sampled, np.full(length, -1.0, np.float32), (VersionSpan(0, 0, length),), none)


def advantages(group: Group, rule: AdvantageRule) -> list[float] | None:
    found = scored_advantages(group, rule)
    return None if found is None else [advantage for _, advantage in found]


def test_undivided_advantages_are_differences_from_the_mean() -> None:
    found = group_relative([1.0, 0.0, 0.0, 0.0], by_deviation=False)
    assert found is not None
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (15, -1.0)]
)
def test_the_penalty_grows_over_the_margin(length: int, penalty: float) -> None:
    assert overlong_penalty(length, SHAPED) == penalty
    assert overlong_penalty(length, AdvantageRule()) == 0.0


def test_shaping_lowers_what_is_long() -> None:
    members = group((1.0, 5), (1.0, 8), (0.0, 10), (0.0, 3))
    plain = AdvantageRule(by_deviation=False)
    shaped = AdvantageRule(by_deviation=False, overlong_tokens=4, limit_tokens=10)
    assert advantages(members, plain) == [0.5, 0.5, -0.5, -0.5]
    # The shaped rewards are 1, 0.5, -1 and 0: their mean is 0.125.
    assert advantages(members, shaped) == [0.875, 0.375, -1.125, -0.125]


def test_lengths_alone_are_no_signal_and_may_take_one_away() -> None:
    assert advantages(group((0.0, 10), (0.0, 3)), SHAPED) is None
    assert advantages(group((1.0, 10), (0.0, 3)), SHAPED) is None
