"""Families that use the sandbox for more than a calculator: they set it up, or find the verdict in it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from rl.boxes import Box
from rl.dialogue import STYLE, PromptStyle
from rl.tasks.base import Problem
from rl.types import Task
from sandboxd.errors import FileNotFound

Answer = Literal["reply", "code", "state"]
SHELL = ("sh", "-c")
PYTHON = ("python3", "-I", "-S", "-c")
"""Python without site packages, which starts in a third of the time."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How episodes of a family are played.

    `program` runs a block of the model, which is its last argument. `answer` is what is judged: the `reply`
    without a block that ends the episode; the first block's `code`, which is handed in rather than run; or
    the `state` that the sandbox is in when the episode ends, also where a limit ends it.
    """

    style: PromptStyle = STYLE
    program: tuple[str, ...] = PYTHON
    answer: Answer = "reply"


class Sandboxed(ABC):
    """A family that is judged in the sandbox. Inherit from it; `name`, `levels`, `make` are as in `Family`.

    `prepare` and `judge` run on an event loop of the tasks' own, beside that of the episodes, so they may
    wait; where they block they keep other tasks' code waiting. What they raise leaves the episode unscored.
    """

    name: str
    levels: tuple[str, ...]
    rules: Rules = Rules()

    @abstractmethod
    def make(self, level: int, rng: random.Random) -> Problem: ...

    async def prepare(self, task: Task, box: Box) -> None:  # noqa: B027 - few tasks need it
        """Puts into a fresh sandbox what the task needs, before the model's first block is run."""

    @abstractmethod
    async def judge(self, task: Task, answer: str, box: Box) -> float:
        """The reward in [0, 1]. `answer` is the reply or the code; empty where the state is judged."""


async def read_text(box: Box, path: str) -> str | None:
    """A file of the sandbox as text; None when it is not there. Read by the sandbox's guest, and not by a
    program in the sandbox that the model may have replaced."""
    try:
        return (await box.read_file(path)).decode(errors="replace")
    except FileNotFound:
        return None
