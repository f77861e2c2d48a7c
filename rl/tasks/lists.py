"""Questions about a list of whole numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

from rl.tasks.base import Numeric, Problem

Ask = tuple[str, Callable[[list[int]], int]]

LARGEST: Ask = ("What is the largest number in {}?", max)
SMALLEST: Ask = ("What is the smallest number in {}?", min)
LENGTH: Ask = ("How many numbers are in {}?", len)
SECOND: Ask = ("What is the second largest number in {}?", lambda numbers: sorted(numbers)[-2])
RANGE: Ask = ("What is the largest minus the smallest number in {}?", lambda n: max(n) - min(n))
EVEN: Ask = ("How many numbers in {} are even?", lambda n: sum(x % 2 == 0 for x in n))
EVEN_SUM: Ask = ("What is the sum of the even numbers in {}?", lambda n: sum(x for x in n if x % 2 == 0))
SQUARES: Ask = ("What is the sum of the squares of {}?", lambda n: sum(x * x for x in n))


class Lists(Numeric):
    """`What is the second largest number in [12, 7, 30]?`; the level decides the question asked."""

    name = "lists"
    levels = (
        "largest, 4 numbers",
        "largest, smallest, length, 6 numbers",
        "second largest, range, 6 numbers",
        "even numbers: how many, and their sum",
        "sum of squares or of even numbers, 9 numbers",
    )

    def make(self, level: int, rng: random.Random) -> Problem:
        asked: tuple[tuple[Ask, ...], ...] = (
            (LARGEST,),
            (LARGEST, SMALLEST, LENGTH),
            (SECOND, RANGE),
            (EVEN, EVEN_SUM),
            (SQUARES, EVEN_SUM),
        )
        length = (4, 6, 6, 6, 9)[level] + rng.randint(-1, 1)
        question, answer = rng.choice(asked[level])
        numbers = rng.sample(range(1, 99), length)
        return Problem(question.format(numbers), str(answer(numbers)))
