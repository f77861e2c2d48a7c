"""The problems of a fixed set, one by one: what teaches nothing rests, and is not lost."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rl.curriculum import BandSettings, SolveRateBands
from rl.errors import Exhausted
from rl.tasks import Problem, TaskSource
from rl.tasks.source import UnknownFamily, is_held_out
from rl.types import Task

SETTINGS = BandSettings(memory=16.0, rest=4)
GROUP = 8


class Quiz:
    """Thirty problems, told apart by their number: a third each is trivial, within reach, and out of it."""

    name = "quiz"
    levels = ("one",)

    def problems(self, level: int) -> Sequence[Problem]:
        return [Problem(f"question {number}", str(number)) for number in range(30)]

    def make(self, level: int, rng: random.Random) -> Problem:
        return rng.choice(self.problems(level))

    def verify(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)


SOURCE = TaskSource([Quiz()])
SIZE = SOURCE.set_size("quiz", 0)
Rate = Callable[[str], float]


def thirds(question: str) -> float:
    return (0.0, 0.5, 1.0)[int(question.split()[1]) % 3]


def bands(settings: BandSettings = SETTINGS) -> SolveRateBands:
    return SolveRateBands(SOURCE, ["quiz"], seed=0, settings=settings)


def play(curriculum: SolveRateBands, groups: int, rate: Rate = thirds) -> list[Task]:
    """So many groups, one after the other."""
    tasks = []
    for _ in range(groups):
        tasks.append(curriculum.next_task())
        solved = round(rate(tasks[-1].question) * GROUP)
        curriculum.observe(tasks[-1], [1.0] * solved + [0.0] * (GROUP - solved))
    return tasks


def within_reach(tasks: Sequence[Task]) -> float:
    return sum(thirds(task.question) == 0.5 for task in tasks) / len(tasks)


def test_what_is_trivial_or_out_of_reach_rests_and_comes_again() -> None:
    curriculum = bands()
    first = play(curriculum, 2 * SIZE)
    assert Counter(task.question for task in first).most_common()[-1][1] == 2, "two epochs, of all problems"
    resting = curriculum.metrics()["curriculum/resting/quiz/0"]
    assert resting == sum(thirds(question) != 0.5 for question in {task.question for task in first})
    later = play(curriculum, 6 * SIZE)
    assert within_reach(first) < 0.4
    assert within_reach(later) > 0.7
    assert {task.question for task in later} == {task.question for task in first}, "none is lost"
    assert len({task.key for task in (*first, *later)}) == 8 * SIZE, "nor given twice"
    assert curriculum.metrics()["curriculum/revived"] > 0


def test_a_problem_that_comes_within_reach_is_drawn_as_the_others() -> None:
    curriculum = bands()
    play(curriculum, 3 * SIZE)
    tasks = play(curriculum, 8 * SIZE, lambda question: 0.5)[-2 * SIZE :]
    counts = Counter(task.question for task in tasks)
    assert (len(counts), max(counts.values()) <= 3) == (SIZE, True), "two epochs' worth, wherever they begin"
    assert curriculum.metrics()["curriculum/resting/quiz/0"] == 0.0


def test_without_rest_each_epoch_has_every_problem() -> None:
    tasks = play(bands(replace(SETTINGS, rest=0)), 6 * SIZE)
    assert set(Counter(task.question for task in tasks).values()) == {6}


def test_a_set_of_which_all_rest_is_still_drawn_until_it_is_known_to_be_solved() -> None:
    assert len(play(bands(), 5 * SIZE, lambda question: 0.0)) == 5 * SIZE
    with pytest.raises(Exhausted):
        play(bands(), 5 * SIZE, lambda question: 1.0)


def test_a_set_without_a_problem_to_train_on_is_told_in_one_line() -> None:
    class HeldOut(Quiz):
        def problems(self, level: int) -> Sequence[Problem]:
            return [each for each in super().problems(level) if is_held_out(each.question)]

    with pytest.raises(UnknownFamily, match="family 'quiz' has no problem of level 0 to train on; add one"):
        SolveRateBands(TaskSource([HeldOut()]), ["quiz"], seed=0).next_task()


def test_a_resumed_one_draws_on_as_the_first() -> None:
    curriculum, resumed = bands(), bands()
    play(curriculum, 4 * SIZE + 3)
    state = json.loads(json.dumps(curriculum.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert play(resumed, 5 * SIZE) == play(curriculum, 5 * SIZE)
    assert resumed.metrics() == curriculum.metrics()


def test_a_checkpoint_without_problems_is_gone_on_with() -> None:
    curriculum, resumed = bands(), bands()
    play(curriculum, SIZE)
    state = curriculum.state_dict()
    del state["problems"]
    resumed.load_state_dict(state)
    assert len(play(resumed, 3 * SIZE)) == 3 * SIZE
