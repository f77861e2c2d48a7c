"""Sums of two to eight numbers."""

from __future__ import annotations

import random

from rl.tasks.base import Numeric, Problem

SHAPES = ((2, 9), (2, 99), (2, 999), (3, 999), (5, 999), (8, 999))


class Sums(Numeric):
    """`What is 437 + 92 + 310?`; the level decides how many terms, and how large."""

    name = "sums"
    levels = tuple(f"{terms} terms up to {largest}" for terms, largest in SHAPES)

    def make(self, level: int, rng: random.Random) -> Problem:
        terms, largest = SHAPES[level]
        smallest = 10 if largest > 9 else 1
        numbers = [rng.randint(smallest, largest) for _ in range(terms)]
        return Problem(f"What is {' + '.join(map(str, numbers))}?", str(sum(numbers)))
