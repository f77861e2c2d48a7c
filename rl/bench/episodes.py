"""What the simulated model is asked and what it writes: tasks, lengths, verdicts, all drawn from one seed.

An episode has two turns, a call of the tool and an answer. Its length is lognormal, with the same mean for
every spread, and half of the spread belongs to the task: some tasks are long for every attempt. Whether an
attempt is solved depends on the level alone, so that a length bias is the policy's doing and nobody else's.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rl.boxes import Box
from rl.dialogue import PromptStyle
from rl.tasks import Problem, Rules, Sandboxed
from rl.types import Task, TokenIds

SOLVE_RATES = (0.6, 0.5, 0.4, 0.3)
MAX_LENGTH = 16.0
"""No episode is longer than so many times the mean: an engine has a limit, too."""
MIN_TURN = 8
END_OF_TURN = 257
FILLER = ord("x")
HEAD = b"# %d %d\n"
PLAN = re.compile(rb"# (\d+) ([01])\n")
QUESTION = re.compile(rb"task (\d+): length ([0-9.]+), solved ([0-9.]+)")


class MarkedBytes:
    """One token a byte, and two marks: as `rl.byte_tokenizer`, made for episodes of many thousand tokens."""

    MARKS = ("<|im_start|>", "<|im_end|>")

    @property
    def end_of_turn(self) -> int:
        return END_OF_TURN

    def encode(self, text: str) -> list[int]:
        return list(text.replace(self.MARKS[0], "\x02").replace(self.MARKS[1], "\x03").encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


class Simulated(Sandboxed):
    """The family of the bench; `spread` is the deviation of the logarithm of an episode's length."""

    name = "simulated"
    levels = tuple(f"solved {rate:.0%}" for rate in SOLVE_RATES)
    rules = Rules(style=PromptStyle("Run Python.", ()))

    def __init__(self, spread: float) -> None:
        self._deviation = spread * math.sqrt(0.5)

    def make(self, level: int, rng: random.Random) -> Problem:
        length = math.exp(rng.gauss(0.0, self._deviation) - self._deviation**2 / 2)
        question = f"task {rng.getrandbits(48)}: length {length:.6f}, solved {SOLVE_RATES[level]}"
        return Problem(question, "right")

    async def prepare(self, task: Task, box: Box) -> None:
        """Nothing to prepare."""

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        return float(answer.startswith(task.answer))


class Episodes:
    """Writes the turns. `mean_tokens` is the mean length of an episode, both turns together."""

    def __init__(self, mean_tokens: int, spread: float, seed: int, *, hang_every: int = 0) -> None:
        """Of so many episodes one never ends its first turn; none when 0."""
        self.count = 0
        self.tokens = 0
        """Tokens that all episodes begun so far would have at their ends."""
        self.drawn: list[tuple[int, int, bool]] = []
        """Of every episode, as they began: its task's number, its tokens, whether it will be solved. So what
        came of them can be compared with what could have."""
        self._mean = mean_tokens
        self._deviation = spread * math.sqrt(0.5)
        self._seed = seed
        self._hang_every = hang_every
        self._attempts: Counter[int] = Counter()

    def hangs(self) -> bool:
        """Whether the turn that was written last never ends."""
        return self._hang_every > 0 and self.count % self._hang_every == 0

    def turn(self, context_ids: TokenIds, limit: int) -> tuple[TokenIds, str]:
        """The next turn after this context, at most `limit` tokens, and why it ends."""
        context = context_ids.astype(np.uint8).tobytes()
        plan = PLAN.search(context)
        if plan is None:
            return self._first(context), "stop"
        total, solved = int(plan[1]), plan[2] == b"1"
        return self._text(b"right" if solved else b"wrong", b"", total - total // 2)[:limit], "stop"

    def _first(self, context: bytes) -> TokenIds:
        """The call of the tool; it begins with what the rest of the episode will be."""
        asked = QUESTION.search(context)
        if asked is None:
            raise ValueError("the context holds no question of the simulated family")
        number = int(asked[1])
        self._attempts[number] += 1
        rng = random.Random(f"{self._seed}/{number}/{self._attempts[number]}")
        own = math.exp(rng.gauss(0.0, self._deviation) - self._deviation**2 / 2)
        total = max(round(self._mean * min(float(asked[2]) * own, MAX_LENGTH)), 2 * MIN_TURN + 16)
        self.count += 1
        self.tokens += total
        solved = rng.random() < float(asked[3])
        self.drawn.append((number, total, solved))
        head = HEAD % (total, solved)
        return self._text(head, b"\n```", total // 2)

    def _text(self, head: bytes, tail: bytes, count: int) -> TokenIds:
        ids = np.full(max(count, len(head) + len(tail) + 1), FILLER, np.int32)
        ids[: len(head)] = np.frombuffer(head, np.uint8)
        if tail:
            ids[-len(tail) :] = np.frombuffer(tail, np.uint8)
        else:
            ids[-1] = END_OF_TURN
        return ids
