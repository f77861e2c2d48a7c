"""What a task family is: a named generator of problems in levels, with its own verifier."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rl.types import Task

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question as the model reads it, and the answer that the verifier compares with."""

    question: str
    answer: str


class Family(Protocol):
    """A kind of problem. To add one, write a class like this in one file and name it to `TaskSource`.

    `levels` describes each level in words, easiest first; the curriculum walks along it. `make` must
    depend on `level` and `rng` alone. `verify` is the reward in [0, 1] of a final answer; it runs in a thread
    of its own, so it may block. `rl.tasks.Sandboxed` is for what must be judged in the sandbox.
    """

    @property
    def name(self) -> str: ...

    @property
    def levels(self) -> tuple[str, ...]: ...

    def make(self, level: int, rng: random.Random) -> Problem: ...

    def verify(self, task: Task, answer: str) -> float: ...


@runtime_checkable
class FixedSet(Protocol):
    """What a family offers beside the rest when it has a fixed set of problems, to be measured whole."""

    @property
    def levels(self) -> tuple[str, ...]: ...

    def problems(self, level: int) -> Sequence[Problem]: ...


def match_number(task: Task, answer: str) -> float:
    """1.0 when the last number in `answer` equals the task's, else 0.0. `1,234` is read as 1234."""
    found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", answer))
    return float(bool(found) and float(found[-1]) == float(task.answer))


def match_text(task: Task, answer: str) -> float:
    """1.0 when `answer` is the task's answer but for case, spaces, quotes and a full stop, else 0.0."""
    return float(plain(answer) == plain(task.answer))


def plain(text: str) -> str:
    """`text` in lower case, without quotes, backticks, a final full stop, and with single spaces."""
    return " ".join(re.sub(r"[\"'`]", "", text).strip().rstrip(".").lower().split())


class Numeric:
    """Mixin for families whose answers are numbers."""

    def verify(self, task: Task, answer: str) -> float:
        return match_number(task, answer)


class Textual:
    """Mixin for families whose answers are texts (words, lists, dates)."""

    def verify(self, task: Task, answer: str) -> float:
        return match_text(task, answer)
