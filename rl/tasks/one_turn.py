"""The six benchmark kinds in one turn: the model writes one block of code, and what that prints is judged.

The simplest form of the task, which trainers without tools can be given, too: `configs/one_turn.toml`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from rl.boxes import Box
from rl.tasks.base import Family, Problem
from rl.tasks.heldout import BENCHMARK
from rl.tasks.letters import Letters
from rl.tasks.sandboxed import PYTHON, Rules, Sandboxed
from rl.tasks.sums import Sums
from rl.tasks.words import Words
from rl.types import Task

PREFIX = "one_turn_"
CODE_SECONDS = 5.0
OUTPUT_LIMIT_BYTES = 16384

BASES: Mapping[str, Family] = {family.name: family for family in (Sums(), Words(), Letters())}


class OneTurn(Sandboxed):
    """One benchmark kind; its only level is the one that the benchmark measures.

    The first block is handed in and run once. The verifier of the kind's own family judges its output, so
    code that fails, or prints nothing, earns nothing.
    """

    rules = Rules(answer="code")

    def __init__(self, kind: str) -> None:
        family, self._level = BENCHMARK[kind]
        self._base = BASES[family]
        self.name = PREFIX + kind
        self.levels = (self._base.levels[self._level],)

    def make(self, level: int, rng: random.Random) -> Problem:
        return self._base.make(self._level, rng)

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        # No word of a command line can hold a zero byte; the code is wrong with it or without.
        argv = [*PYTHON, answer.replace("\0", "")]
        result = await box.exec(argv, timeout=CODE_SECONDS, output_limit=OUTPUT_LIMIT_BYTES)
        if result.reason != "EXITED" or result.exit_code:
            return 0.0
        return self._base.verify(task, result.stdout.decode(errors="replace"))


def one_turn_families() -> tuple[OneTurn, ...]:
    """One for each benchmark kind."""
    return tuple(OneTurn(kind) for kind in BENCHMARK)
