"""Tasks: deterministic, disjoint, verified by an independent reading of the question."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.config import Config
from rl.run import task_source
from rl.tasks import (
    BENCHMARK,
    Problem,
    TaskSource,
    UnknownFamily,
    build_held_out,
    builtin_families,
    is_held_out,
    load_family,
)
from rl.tasks.base import Numeric, match_number, match_text
from rl.tasks.dates import Dates
from rl.tasks.letters import Letters
from rl.tasks.lists import Lists
from rl.tasks.sums import Sums
from rl.tasks.words import Words
from rl.types import Task

SOURCE = TaskSource(builtin_families())
PLACES = [(family, level) for family, count in SOURCE.levels().items() for level in range(count)]


def task(answer: str) -> Task:
    return Task("k", "f", 0, "q", answer)


@pytest.mark.parametrize(("family", "level"), PLACES)
def test_a_task_is_decided_by_family_level_and_seed(family: str, level: int) -> None:
    again = TaskSource(builtin_families())
    for seed in range(3):
        assert SOURCE.train(family, level, seed) == again.train(family, level, seed)
        assert SOURCE.held_out(family, level, seed) == again.held_out(family, level, seed)
    assert len({SOURCE.train(family, level, seed).key for seed in range(3)}) == 3


@pytest.mark.parametrize(("family", "level"), PLACES)
def test_training_and_held_out_never_share_a_question(family: str, level: int) -> None:
    train = {SOURCE.train(family, level, seed).question for seed in range(25)}
    held = {SOURCE.held_out(family, level, seed).question for seed in range(25)}
    assert not train & held
    assert not any(is_held_out(question) for question in train)
    assert all(is_held_out(question) for question in held)


@pytest.mark.parametrize(("family", "level"), PLACES)
def test_the_right_answer_is_rewarded_and_another_is_not(family: str, level: int) -> None:
    for seed in range(5):
        drawn = SOURCE.train(family, level, seed)
        assert SOURCE.verify(drawn, drawn.answer) == 1.0
        assert SOURCE.verify(drawn, f"{drawn.answer}7") == 0.0
        assert SOURCE.verify(drawn, "") == 0.0


def test_sums_have_the_terms_they_claim() -> None:
    for kind, terms in (("sums_2", 2), ("sums_3", 3), ("sums_5", 5)):
        family, level = BENCHMARK[kind]
        for seed in range(20):
            drawn = SOURCE.held_out(family, level, seed)
            numbers = [int(number) for number in re.findall(r"\d+", drawn.question)]
            assert len(numbers) == terms
            assert all(10 <= number <= 999 for number in numbers)
            assert sum(numbers) == int(drawn.answer)


@given(st.integers(0, len(Letters.levels) - 1), st.integers())
def test_letter_counts_count_the_letter(level: int, seed: int) -> None:
    problem = Letters().make(level, random.Random(seed))
    quoted = re.findall(r'"([^"]+)"', problem.question)
    text, letter = max(quoted, key=len), min(quoted, key=len)
    assert text.count(letter) == int(problem.answer) > 0


def test_no_constant_answer_solves_letter_counts() -> None:
    answers = [SOURCE.train("letters", BENCHMARK["letters"][1], seed).answer for seed in range(200)]
    assert max(answers.count(answer) for answer in set(answers)) < 0.45 * len(answers)


EXPRESSION_GIVEN = 3


@pytest.mark.parametrize("level", [0, 1, *range(3, len(Words.levels))])
def test_word_problems_do_not_pay_for_adding_whatever_the_story(level: int) -> None:
    """But for the one step that introduces a third number."""
    problems = [Words().make(level, random.Random(seed)) for seed in range(40)]
    stories = [problem.question.partition(" Compute ")[0] for problem in problems]
    sums = [sum(map(int, re.findall(r"\d+", story))) for story in stories]
    added = sum(int(problem.answer) == total for problem, total in zip(problems, sums, strict=True))
    assert added < 0.75 * len(problems)


@given(st.integers(0, len(Words.levels) - 1), st.integers())
def test_word_problems_have_whole_positive_answers(level: int, seed: int) -> None:
    problem = Words().make(level, random.Random(seed))
    assert int(problem.answer) > 0
    story, _, expression = problem.question.partition(" Compute ")
    assert len(re.findall(r"\d+", story)) == (2, 2, 3, 3, 3, 3)[min(level, 5)] or level >= 6
    assert bool(expression) == (level == EXPRESSION_GIVEN)
    if expression:
        parts = re.fullmatch(r"(\d+) (.) (\d+) (.) (\d+)\.", expression)
        assert parts is not None
        first, operator, second, last, third = parts.groups()
        start = int(first) * int(second) if operator == "*" else int(first) + int(second)
        assert int(problem.answer) == start + int(f"{last}{third}")


@given(st.integers(0, len(Lists.levels) - 1), st.integers())
def test_lists_name_a_list_of_numbers(level: int, seed: int) -> None:
    problem = Lists().make(level, random.Random(seed))
    assert re.search(r"\[\d+(, \d+)+\]", problem.question)


@given(st.integers(0, len(Dates.levels) - 1), st.integers())
def test_dates_are_real(level: int, seed: int) -> None:
    problem = Dates().make(level, random.Random(seed))
    assert re.search(r"\d{4}-\d{2}-\d{2}", problem.question)
    assert problem.answer


def test_the_held_out_set_has_six_equal_kinds_and_every_place() -> None:
    held = build_held_out(SOURCE, per_kind=8, per_level=1)
    assert {kind: len(tasks) for kind, tasks in held.benchmark.items()} == dict.fromkeys(BENCHMARK, 8)
    assert {(drawn.family, drawn.level) for drawn in held.mix} == set(PLACES)
    assert len({drawn.key for drawn in held.tasks()}) == len(held.tasks())


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", "42", 1.0),
        ("42", "The answer is 42.", 1.0),
        ("1234", "1,234", 1.0),
        ("42", "42.0", 1.0),
        ("-4", "-4", 1.0),
        ("42", "142", 0.0),
        ("42", "42 or 43", 0.0),
        ("42", "none", 0.0),
    ],
)
def test_numbers_are_compared_by_value(answer: str, text: str, reward: float) -> None:
    assert match_number(task(answer), text) == reward


@pytest.mark.parametrize(
    ("text", "reward"), [("Friday", 1.0), ('"friday".', 1.0), (" Friday\n", 1.0), ("Fri", 0.0), ("", 0.0)]
)
def test_texts_are_compared_but_for_case_quotes_and_full_stop(text: str, reward: float) -> None:
    assert match_text(task("Friday"), text) == reward


class Doubles(Numeric):
    """A family as a user would add it: one class, no registration."""

    name = "doubles"
    levels = ("small",)

    def make(self, level: int, rng: random.Random) -> Problem:
        number = rng.randint(1, 500)
        return Problem(f"What is twice {number}?", str(2 * number))


class Same(Numeric):
    """A family with one question only, so one side of the split is empty."""

    name = "same"
    levels = ("only",)

    def make(self, level: int, rng: random.Random) -> Problem:
        return Problem("What is 1 + 1?", "2")


def test_a_family_is_one_class() -> None:
    source = TaskSource([Doubles()])
    drawn = source.train("doubles", 0, 3)
    assert source.verify(drawn, drawn.answer) == 1.0


def test_mistakes_in_families_are_named() -> None:
    with pytest.raises(UnknownFamily, match="'nothing'"):
        SOURCE.train("nothing", 0, 0)
    with pytest.raises(UnknownFamily, match="two task families"):
        TaskSource([Sums(), Sums()])
    with pytest.raises(UnknownFamily, match="too few different questions"):
        [TaskSource([Same()]).train("same", 0, 0), TaskSource([Same()]).held_out("same", 0, 0)]
    with pytest.raises(UnknownFamily, match="no_such_module"):
        load_family("no_such_module:Thing")
    assert load_family("rl.tasks.sums:Sums").name == "sums"
    with pytest.raises(UnknownFamily, match="'collections:OrderedDict' is no task family: it has no name"):
        load_family("collections:OrderedDict")
    with pytest.raises(
        UnknownFamily, match=r"no task family 'sumz': there are sums, .* package\.module:Class"
    ):
        task_source(Config(families=["sumz"]))


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("own_syntax", "class Mine(:", r"SyntaxError: .*line 1"),
        ("own_fault", "raise OSError('no such dictionary')", r"OSError: no such dictionary \(.*line 1\)"),
        (
            "own_class",
            "class Mine:\n    def __init__(self):\n        1 / 0",
            r"ZeroDivisionError: .*line 3\)",
        ),
    ],
)
def test_a_fault_in_a_family_of_ones_own_is_one_line_with_its_place(
    tmp_path: Path, name: str, code: str, words: str
) -> None:
    (tmp_path / f"{name}.py").write_text(code + "\n")
    sys.path.append(str(tmp_path))
    try:
        with pytest.raises(UnknownFamily, match=words) as raised:
            load_family(f"{name}:Mine")
    finally:
        sys.path.remove(str(tmp_path))
    assert "\n" not in str(raised.value)
