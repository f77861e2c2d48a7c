"""Word problems of one, two and three steps."""

from __future__ import annotations

import random

from rl.tasks.base import Numeric, Problem
from rl.tasks.vocabulary import ITEMS, NAMES


class Words(Numeric):
    """Small stories about counting things; the level decides how many operations, and which.

    The first level has losses beside gains: a policy that is paid for adding, whatever the story, stops
    trying anything else, and is slow to find its way back.
    """

    name = "words"
    levels = (
        "one step: gains and losses",
        "one step: gains, losses, packs, shares",
        "two steps: gains",
        "two steps: packs or gains, then gains or losses, expression given",
        "two steps: gains and losses",
        "two steps: packs, then gains or losses",
        "two steps: all kinds",
        "three steps",
    )

    def make(self, level: int, rng: random.Random) -> Problem:
        story = Story(rng)
        makers = (
            (story.gain, story.loss),
            (story.gain, story.loss, story.packs, story.share),
            (story.gain_gain,),
            (story.gain_loss_given, story.packs_gain_given, story.packs_loss_given),
            (story.gain_gain, story.gain_loss, story.loss_loss),
            (story.packs_gain, story.packs_loss),
            (story.gain_gain, story.gain_loss, story.packs_gain, story.packs_loss, story.more_together),
            (story.packs_gain_loss, story.packs_packs),
        )
        return rng.choice(makers[level])()


class Story:
    """One story's people, things and numbers, and the ways to tell it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.who, self.other = rng.sample(NAMES, 2)
        self.item = rng.choice(ITEMS)
        self.a = rng.randint(30, 99)
        self.b = rng.randint(11, 60)
        self.c = rng.randint(2, 10)
        self.each = rng.randint(3, 24)
        self.count = rng.randint(3, 15)

    def tell(self, middle: str, answer: int) -> Problem:
        return Problem(f"{self.who} {middle} How many {self.item} does {self.who} have now?", str(answer))

    def gain(self) -> Problem:
        verb = self.rng.choice(("buys", "finds", "gets"))
        return self.tell(f"has {self.a} {self.item} and {verb} {self.b} more.", self.a + self.b)

    def loss(self) -> Problem:
        self.b = min(self.b, self.a - 1)
        verb = self.rng.choice(("sells", "loses", "gives away"))
        return self.tell(f"has {self.a} {self.item} and {verb} {self.b}.", self.a - self.b)

    def packs(self) -> Problem:
        pack = self.rng.choice(("boxes", "bags", "packs"))
        return self.tell(f"buys {self.count} {pack} of {self.each} {self.item}.", self.count * self.each)

    def share(self) -> Problem:
        total = self.count * self.each
        question = f"{self.who} shares {total} {self.item} equally among {self.count} friends."
        return Problem(f"{question} How many {self.item} does each friend get?", str(self.each))

    def gain_gain(self) -> Problem:
        middle = f"has {self.a} {self.item}, buys {self.b} more and finds {self.c} more."
        return self.tell(middle, self.a + self.b + self.c)

    def gain_loss(self) -> Problem:
        verb = self.rng.choice(("sells", "loses", "gives away"))
        middle = f"has {self.a} {self.item}, buys {self.b} more and {verb} {self.c}."
        return self.tell(middle, self.a + self.b - self.c)

    def loss_loss(self) -> Problem:
        b = self.rng.randint(5, self.a - 12)
        middle = f"has {self.a} {self.item}, sells {b} and gives away {self.c}."
        return self.tell(middle, self.a - b - self.c)

    def packs_gain(self) -> Problem:
        middle = f"buys {self.count} boxes of {self.each} {self.item} and finds {self.b} more."
        return self.tell(middle, self.count * self.each + self.b)

    def packs_loss(self) -> Problem:
        lost = self.rng.randint(2, self.count * self.each - 1)
        middle = f"buys {self.count} boxes of {self.each} {self.item} and gives away {lost}."
        return self.tell(middle, self.count * self.each - lost)

    def gain_loss_given(self) -> Problem:
        return self.given(self.gain_loss(), f"{self.a} + {self.b} - {self.c}")

    def packs_gain_given(self) -> Problem:
        return self.given(self.packs_gain(), f"{self.count} * {self.each} + {self.b}")

    def packs_loss_given(self) -> Problem:
        problem = self.packs_loss()
        product = self.count * self.each
        return self.given(problem, f"{self.count} * {self.each} - {product - int(problem.answer)}")

    def given(self, problem: Problem, expression: str) -> Problem:
        """The problem with the expression that solves it."""
        return Problem(f"{problem.question} Compute {expression}.", problem.answer)

    def more_together(self) -> Problem:
        text = f"{self.who} has {self.a} {self.item}. {self.other} has {self.b} more than {self.who}."
        return Problem(f"{text} How many {self.item} do they have together?", str(2 * self.a + self.b))

    def packs_gain_loss(self) -> Problem:
        middle = (
            f"buys {self.count} boxes of {self.each} {self.item}, finds {self.b} more and sells {self.c}."
        )
        return self.tell(middle, self.count * self.each + self.b - self.c)

    def packs_packs(self) -> Problem:
        small = self.rng.randint(3, 9)
        middle = (
            f"buys {self.count} boxes of {self.each} {self.item} and {self.c} bags of {small} {self.item}."
        )
        return self.tell(middle, self.count * self.each + self.c * small)
