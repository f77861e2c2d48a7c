"""Tasks: families of verifiable problems in levels, a training stream, and what is held out.

A family is one class in one file (see `rl.tasks.base.Family`, or `rl.tasks.sandboxed.Sandboxed` where the
verdict is found in the sandbox); `TaskSource` makes tasks of a set of
families, `build_held_out` the problems that are measured before and after training.
"""

from __future__ import annotations

from rl.tasks.base import Family, Problem
from rl.tasks.dates import Dates
from rl.tasks.gym import LADDERS, Gym
from rl.tasks.heldout import BENCHMARK, HeldOut, build_held_out
from rl.tasks.human_eval import HumanEval
from rl.tasks.letters import Letters
from rl.tasks.lists import Lists
from rl.tasks.one_turn import one_turn_families
from rl.tasks.sandboxed import Rules, Sandboxed, read_text
from rl.tasks.shell import Shell
from rl.tasks.source import AnyFamily, TaskSource, UnknownFamily, is_held_out, load_family
from rl.tasks.strings import Strings
from rl.tasks.sums import Sums
from rl.tasks.words import Words

__all__ = [
    "BENCHMARK",
    "AnyFamily",
    "Family",
    "HeldOut",
    "Problem",
    "Rules",
    "Sandboxed",
    "TaskSource",
    "UnknownFamily",
    "build_held_out",
    "builtin_families",
    "is_held_out",
    "load_family",
    "read_text",
    "shipped_families",
]


def builtin_families() -> tuple[Family, ...]:
    """The families that a run trains on when its settings name none."""
    own: tuple[Family, ...] = (Sums(), Words(), Letters(), Lists(), Strings(), Dates())
    return own + tuple(Gym(dataset) for dataset in LADDERS)


def shipped_families() -> dict[str, AnyFamily]:
    """Every family that ships with the project, by name: those above, and those judged in the sandbox."""
    families: tuple[AnyFamily, ...] = (*builtin_families(), HumanEval(), Shell(), *one_turn_families())
    return {family.name: family for family in families}
