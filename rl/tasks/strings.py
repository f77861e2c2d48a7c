"""Questions about one word or a few: length, case, order, pieces."""

from __future__ import annotations

import random
from collections.abc import Callable

from rl.tasks.base import Problem, Textual
from rl.tasks.vocabulary import WORDS

Ask = tuple[str, Callable[[str], str]]

LENGTH: Ask = ('How many characters are in "{}"?', lambda text: str(len(text)))
FIRST: Ask = ('What are the first three characters of "{}"?', lambda text: text[:3])
LAST: Ask = ('What are the last three characters of "{}"?', lambda text: text[-3:])
REVERSE: Ask = ('Write "{}" backwards.', lambda text: text[::-1])
WITHOUT: Ask = ('Write "{}" without the letter "e".', lambda text: text.replace("e", ""))
SORTED: Ask = ('Write the letters of "{}" in alphabetical order.', lambda text: "".join(sorted(text)))
EVERY: Ask = ('Write every second letter of "{}", from the first on.', lambda text: text[::2])
WORD_ORDER: Ask = ('Write the words of "{}" in reverse order.', lambda t: " ".join(reversed(t.split())))
LONGEST: Ask = ('How long is the longest word in "{}"?', lambda t: str(max(map(len, t.split()))))


class Strings(Textual):
    """`Write "lantern" backwards.`; the level decides the question, and how many words there are."""

    name = "strings"
    levels = (
        "length of one word",
        "first or last three characters",
        "backwards, or without a letter",
        "sorted letters, every second letter",
        "several words",
    )

    def make(self, level: int, rng: random.Random) -> Problem:
        asked: tuple[tuple[Ask, ...], ...] = (
            (LENGTH,),
            (FIRST, LAST),
            (REVERSE, WITHOUT),
            (SORTED, EVERY),
            (WORD_ORDER, LONGEST),
        )
        question, answer = rng.choice(asked[level])
        text = " ".join(rng.sample(WORDS, rng.randint(3, 5) if level == 4 else rng.choice((1, 2))))
        return Problem(question.format(text), answer(text))
