"""Tasks: families of verifiable problems in levels, a training stream, and what is held out.

A family is one class in one file (see `rl.tasks.base.Family`); `TaskSource` makes tasks of a set of
families, `build_held_out` the problems that are measured before and after training.
"""

from __future__ import annotations

from rl.tasks.base import Family, Problem
from rl.tasks.dates import Dates
from rl.tasks.gym import LADDERS, Gym
from rl.tasks.heldout import BENCHMARK, HeldOut, build_held_out
from rl.tasks.letters import Letters
from rl.tasks.lists import Lists
from rl.tasks.source import TaskSource, UnknownFamily, is_held_out, load_family
from rl.tasks.strings import Strings
from rl.tasks.sums import Sums
from rl.tasks.words import Words

__all__ = [
    "BENCHMARK",
    "Family",
    "HeldOut",
    "Problem",
    "TaskSource",
    "UnknownFamily",
    "build_held_out",
    "builtin_families",
    "is_held_out",
    "load_family",
]


def builtin_families() -> tuple[Family, ...]:
    """Every family that ships with the project."""
    own: tuple[Family, ...] = (Sums(), Words(), Letters(), Lists(), Strings(), Dates())
    return own + tuple(Gym(dataset) for dataset in LADDERS)
