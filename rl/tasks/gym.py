"""Families from the reasoning-gym package, each at difficulty settings that grow level by level."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rl.tasks.base import Problem, match_number, match_text
from rl.types import Task

LADDERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "gcd": (
        {"min_value": 2, "max_value": 60},
        {"min_value": 60, "max_value": 999},
        {"min_numbers": 3, "max_numbers": 3, "min_value": 60, "max_value": 999},
    ),
    "count_primes": ({"min_n": 1, "max_n": 30}, {"min_n": 10, "max_n": 200}, {"min_n": 100, "max_n": 2000}),
    "spell_backward": (
        {"min_word_len": 3, "max_word_len": 5},
        {"min_word_len": 5, "max_word_len": 8},
        {"min_word_len": 8, "max_word_len": 14},
    ),
    "letter_counting": ({"min_words": 3, "max_words": 4}, {"min_words": 5, "max_words": 9}),
    "lcm": ({"min_value": 2, "max_value": 20}, {"min_value": 20, "max_value": 200}),
    "calendar_arithmetic": (
        {"tasks": ["weekday_of_date"]},
        {"tasks": ["count_days", "count_business_days"]},
    ),
}


class Gym:
    """One reasoning-gym data set as a family. The answers are single numbers or words, so ours verify."""

    def __init__(self, dataset: str) -> None:
        self.name = f"gym_{dataset}"
        self._dataset = dataset
        self._settings = LADDERS[dataset]
        self.levels = tuple(
            ", ".join(f"{key} {value}" for key, value in settings.items()) for settings in self._settings
        )
        self._made: dict[int, Any] = {}

    def make(self, level: int, rng: random.Random) -> Problem:
        import reasoning_gym  # here: it takes two seconds, and only these families need it

        data = self._made.get(level)
        if data is None:
            # Once for each level: some read a long list of words. What they draw follows the seed alone.
            settings = self._settings[level]
            data = self._made[level] = reasoning_gym.create_dataset(self._dataset, size=1, seed=0, **settings)
        data.seed = rng.randrange(1 << 30)
        entry = data[0]
        return Problem(str(entry["question"]), str(entry["answer"]))

    def verify(self, task: Task, answer: str) -> float:
        is_number = task.answer.lstrip("-").isdigit()
        return match_number(task, answer) if is_number else match_text(task, answer)
