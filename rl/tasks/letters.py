"""How often a letter occurs in a word: from the code given, by way of a hint, to the bare question."""

from __future__ import annotations

import random

from rl.tasks.base import Numeric, Problem
from rl.tasks.vocabulary import WORDS

PHRASINGS = (
    'What does print("{word}".count("{letter}")) print?',
    'What is "{word}".count("{letter}")?',
    'Count "{letter}" in "{word}" with .count().',
    'Count "{letter}" in "{word}".',
    'How many times does "{letter}" occur in "{word}"? Use .count().',
    'How many times does "{letter}" occur in "{word}"?',
)
BARE = len(PHRASINGS) - 1


class Letters(Numeric):
    """Letter counts; the level decides how much of the code the question gives away.

    The count is drawn evenly from 1 to 4 where the words allow it, so that no constant answer pays.
    """

    name = "letters"
    levels = (
        "program given",
        "expression given",
        "method named",
        "verb named",
        "bare question, method named after it",
        "bare question, one word",
        "bare question, two to four words",
    )

    def make(self, level: int, rng: random.Random) -> Problem:
        several = level > BARE
        wanted = rng.randint(1, 6 if several else 4)
        text, letter = pick(rng, wanted, words=rng.randint(2, 4) if several else 1)
        phrasing = PHRASINGS[min(level, BARE)]
        return Problem(phrasing.format(word=text, letter=letter), str(text.count(letter)))


def pick(rng: random.Random, wanted: int, *, words: int) -> tuple[str, str]:
    """Draw a text of `words` words with a letter that occurs `wanted` times in it, or nearly so."""
    best = ("banana", "a")
    best_distance = 99
    for _ in range(60):
        text = " ".join(rng.sample(WORDS, words))
        letter = rng.choice(sorted(set(text) - {" "}))
        distance = abs(text.count(letter) - wanted)
        if distance < best_distance:
            best, best_distance = (text, letter), distance
        if distance == 0:
            break
    return best
