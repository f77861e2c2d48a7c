"""The curriculum: deterministic, equal after a round trip, and drawn to the middle band."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.curriculum import BandSettings, Curriculum, SolveRateBands, Uniform
from rl.errors import Exhausted
from rl.tasks import TaskSource
from rl.tasks.letters import Letters
from rl.tasks.sums import Sums
from rl.tasks.words import Words
from rl.types import Task

SOURCE = TaskSource([Sums(), Words(), Letters()])
FAMILIES = ["sums", "words", "letters"]


WIDE = BandSettings(low=0.1, high=0.9, outside=0.1, open_at=0.5, memory=16.0)


def bands(seed: int = 0, settings: BandSettings = WIDE) -> SolveRateBands:
    return SolveRateBands(SOURCE, FAMILIES, seed=seed, settings=settings)


def uniform(seed: int = 0) -> Uniform:
    return Uniform(SOURCE, [("sums", 2), ("words", 1), ("letters", 5)], seed=seed)


def teach(curriculum: Curriculum, place: tuple[str, int], rate: float, groups: int = 4) -> None:
    task = SOURCE.train(*place, 0)
    solved = round(rate * 8)
    for _ in range(groups):
        curriculum.observe(task, [1.0] * solved + [0.0] * (8 - solved))


def drawn(curriculum: Curriculum, count: int = 400) -> Counter[tuple[str, int]]:
    """Where so many groups lie of which each is lost before the next begins."""
    tasks = []
    for _ in range(count):
        tasks.append(curriculum.next_task())
        curriculum.observe(tasks[-1], [])
    return Counter((task.family, task.level) for task in tasks)


@pytest.mark.parametrize("build", [bands, uniform])
def test_the_same_seed_draws_the_same_tasks_and_none_twice(build: Callable[[int], Curriculum]) -> None:
    first, second, other = build(3), build(3), build(4)
    tasks = [first.next_task() for _ in range(60)]
    assert tasks == [second.next_task() for _ in range(60)]
    assert tasks != [other.next_task() for _ in range(60)]
    assert len({task.key for task in tasks}) == 60


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8), max_size=40))
def test_state_is_equal_after_a_round_trip(rewards: list[list[float]]) -> None:
    original = bands(seed=1)
    for group in rewards:
        original.observe(original.next_task(), group)
    text = json.dumps(original.state_dict(), sort_keys=True)
    restored = bands(seed=99)
    restored.load_state_dict(json.loads(text))
    assert json.dumps(restored.state_dict(), sort_keys=True) == text
    assert [restored.next_task() for _ in range(20)] == [original.next_task() for _ in range(20)]


def test_it_starts_at_the_easiest_levels() -> None:
    assert bands().open_places() == [("sums", 0), ("words", 0), ("letters", 0)]


def test_a_level_opens_when_the_one_before_is_learned() -> None:
    curriculum = bands()
    teach(curriculum, ("sums", 0), 0.25)
    assert ("sums", 1) not in curriculum.open_places()
    teach(curriculum, ("sums", 0), 1.0)
    assert ("sums", 1) in curriculum.open_places()
    assert ("sums", 2) not in curriculum.open_places()


def test_the_last_level_is_the_end() -> None:
    curriculum = bands()
    for _ in range(3):
        for level in range(len(Sums.levels)):
            teach(curriculum, ("sums", level), 1.0)
    opened = [level for family, level in curriculum.open_places() if family == "sums"]
    assert opened == list(range(len(Sums.levels)))


def test_the_tasks_run_out_when_every_level_is_solved() -> None:
    curriculum = bands()
    places = [(name, level) for name, count in SOURCE.levels().items() for level in range(count)]
    for place in places:
        teach(curriculum, place, 1.0)
    teach(curriculum, places[-1], 0.75)
    curriculum.next_task()
    teach(curriculum, places[-1], 1.0)
    with pytest.raises(Exhausted, match="every level of sums, words, letters is solved"):
        curriculum.next_task()
    restored = bands()
    restored.load_state_dict(curriculum.state_dict())
    with pytest.raises(Exhausted):
        restored.next_task()


def test_the_middle_band_is_drawn_most() -> None:
    curriculum = bands()
    teach(curriculum, ("sums", 0), 1.0, groups=6)
    teach(curriculum, ("sums", 1), 0.5)
    teach(curriculum, ("letters", 0), 0.0, groups=6)
    counts = drawn(curriculum)
    assert counts["sums", 1] > 3 * counts["sums", 0] > 0
    assert counts["words", 0] > 3 * counts["letters", 0] > 0


def test_a_new_place_is_tried_before_it_is_tried_again() -> None:
    """Ten groups start before any has ended: they spread over the open places."""
    curriculum = bands()
    teach(curriculum, ("sums", 0), 1.0, groups=6)
    tasks = [curriculum.next_task() for _ in range(12)]
    counts = Counter((task.family, task.level) for task in tasks)
    fresh = [counts[place] for place in (("sums", 1), ("words", 0), ("letters", 0))]
    assert sum(fresh) >= 9
    assert counts["sums", 1] <= 4


def test_a_family_with_many_open_levels_is_drawn_no_more_often() -> None:
    curriculum = bands()
    for level in range(len(Sums.levels)):
        teach(curriculum, ("sums", level), 0.5)
    share = sum(1 for _ in range(300) if curriculum.next_task().family == "sums") / 300
    assert 0.1 < share < 0.35


def test_a_family_that_is_nearly_learned_leaves_room_for_one_that_has_hardly_begun() -> None:
    curriculum = bands()
    for level in range(len(Sums.levels) - 1):
        teach(curriculum, ("sums", level), 1.0)
    teach(curriculum, ("sums", len(Sums.levels) - 1), 1 / 3)
    teach(curriculum, ("words", 0), 1 / 3)
    teach(curriculum, ("letters", 0), 1.0, groups=6)
    families = Counter(family for family, _ in drawn(curriculum).elements())
    assert families["words"] > 2 * families["sums"] > 0


def test_a_place_counts_in_full_again_once_its_groups_have_ended() -> None:
    curriculum = bands()
    tasks = [curriculum.next_task() for _ in range(30)]
    for task in tasks:
        curriculum.observe(task, [])
    assert curriculum.state_dict()["playing"] == []


def test_a_solve_rate_is_forgotten_as_the_policy_moves() -> None:
    curriculum = bands()
    teach(curriculum, ("words", 0), 0.0, groups=10)
    before = curriculum.metrics()["curriculum/solve_rate/words/0"]
    teach(curriculum, ("words", 0), 1.0, groups=2)
    assert before < 0.1 < 0.7 < curriculum.metrics()["curriculum/solve_rate/words/0"]


def test_a_level_that_is_learned_retires_and_one_that_is_lost_again_comes_back() -> None:
    curriculum = bands()
    teach(curriculum, ("words", 0), 1.0)
    teach(curriculum, ("sums", 0), 0.5)
    retired = drawn(curriculum)[("words", 0)]
    assert curriculum.weight(("words", 0)) == WIDE.outside
    assert 0 < retired < 60, "rarely, but often enough to be seen"
    teach(curriculum, ("words", 0), 0.4, groups=2)
    assert drawn(curriculum)[("words", 0)] > 2 * retired


def test_a_group_without_scored_episodes_teaches_nothing() -> None:
    curriculum = bands()
    before = curriculum.state_dict()
    curriculum.observe(SOURCE.train("sums", 0, 0), [])
    curriculum.observe(Task("k", "unknown", 0, "q", "a"), [1.0])
    assert curriculum.state_dict() == before


def test_uniform_draws_every_place_equally_often() -> None:
    counts = drawn(uniform(), 600)
    assert set(counts) == {("sums", 2), ("words", 1), ("letters", 5)}
    assert min(counts.values()) > 150


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="band"):
        BandSettings(low=0.9, high=0.1)
    with pytest.raises(ValueError, match="positive"):
        BandSettings(outside=0.0)
    with pytest.raises(ValueError, match="no family"):
        SolveRateBands(SOURCE, [], seed=0)
    with pytest.raises(ValueError, match="no family and level"):
        Uniform(SOURCE, [], seed=0)
