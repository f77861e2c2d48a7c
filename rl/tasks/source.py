"""Where tasks come from: a training stream and a held-out set that can never share a question."""

from __future__ import annotations

import hashlib
import importlib
import random
import traceback
from collections.abc import Iterable, Sequence

from rl.tasks.base import Family, FixedSet, Problem
from rl.tasks.sandboxed import Sandboxed
from rl.types import Task

AnyFamily = Family | Sandboxed

PARTS = ("name", "levels", "make")
"""Without these nothing is a family."""
HELD_OUT_SHARE = 8  # one question in this many is held out
ATTEMPTS = 400
SEEDS_OF_A_RUN = 1_000_000
"""A run of seed s takes its training tasks' seeds from s times this on."""


class UnknownFamily(ValueError):
    """A task family was named that does not exist or is not one."""


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the held-out side. It is decided by the question's text alone.

    So the two sides cannot meet, whatever seeds drew them and whoever wrote the family.
    """
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


class TaskSource:
    """Makes tasks of the given families. The same (family, level, seed) gives the same task, always."""

    def __init__(self, families: Iterable[AnyFamily]) -> None:
        self.families: dict[str, AnyFamily] = {}
        for family in families:
            if family.name in self.families:
                raise UnknownFamily(f"two task families are called {family.name!r}; rename one")
            self.families[family.name] = family
        self._of_training: dict[tuple[str, int], list[Problem]] = {}
        """Of fixed sets, once they were asked for: which side each question is on takes a digest of it."""

    def levels(self) -> dict[str, int]:
        """How many levels each family has."""
        return {name: len(family.levels) for name, family in self.families.items()}

    def train(self, family: str, level: int, seed: int) -> Task:
        """The training task number `seed` of a family and level.

        A fixed set is gone through in epochs: each problem once, in an order of the epoch's own, before any
        comes again. Raises UnknownFamily where it has none.
        """
        if isinstance(self._family(family), FixedSet):
            return self._from_set(family, level, seed)
        return self._draw("train", family, level, seed)

    def set_size(self, family: str, level: int) -> int:
        """How many problems there are to train on, of a family that has a fixed set of them; else 0."""
        return len(self._training_set(family, level))

    def _training_set(self, family: str, level: int) -> list[Problem]:
        found = self._of_training.get((family, level))
        if found is None:
            made = self._family(family)
            problems = made.problems(level) if isinstance(made, FixedSet) else ()
            found = [each for each in problems if not is_held_out(each.question)]
            self._of_training[family, level] = found
        return found

    def _from_set(self, family: str, level: int, seed: int) -> Task:
        problems = self._training_set(family, level)
        if not problems:
            raise UnknownFamily(
                f"task family {family!r} has no problem of level {level} to train on; add one"
            )
        run, number = divmod(seed, SEEDS_OF_A_RUN)
        epoch, place = divmod(number, len(problems))
        order = list(range(len(problems)))
        random.Random(f"epoch/{family}/{level}/{run}/{epoch}").shuffle(order)
        problem = problems[order[place]]
        return Task(f"train/{family}/{level}/{seed}", family, level, problem.question, problem.answer)

    def held_out(self, family: str, level: int, seed: int) -> Task:
        """The held-out task number `seed` of a family and level."""
        return self._draw("heldout", family, level, seed)

    def all_of(self, family: str) -> tuple[Task, ...]:
        """Every problem of a family that has a fixed set of them, whichever side it is on; else none."""
        found = self._family(family)
        if not isinstance(found, FixedSet):
            return ()
        return tuple(
            Task(f"all/{family}/{level}/{number}", family, level, problem.question, problem.answer)
            for level in range(len(found.levels))
            for number, problem in enumerate(found.problems(level))
        )

    def sandboxed(self, task: Task) -> Sandboxed | None:
        """The task's family when it is judged in the sandbox."""
        family = self.families[task.family]
        return family if isinstance(family, Sandboxed) else None

    def verify(self, task: Task, answer: str) -> float:
        """The reward in [0, 1] of a final answer, of a family that is judged outside of the sandbox."""
        family = self.families[task.family]
        if isinstance(family, Sandboxed):
            raise UnknownFamily(f"task family {task.family!r} is judged in the sandbox; use a Referee")
        return family.verify(task, answer)

    def _draw(self, side: str, family: str, level: int, seed: int) -> Task:
        made = self._family(family)
        rng = random.Random(f"{side}/{family}/{level}/{seed}")
        for _ in range(ATTEMPTS):
            problem = made.make(level, rng)
            if is_held_out(problem.question) == (side == "heldout"):
                key = f"{side}/{family}/{level}/{seed}"
                return Task(key, family, level, problem.question, problem.answer)
        raise UnknownFamily(
            f"task family {family!r} gave no {side} problem of level {level} in {ATTEMPTS} draws: "
            "it has too few different questions"
        )

    def _family(self, name: str) -> AnyFamily:
        if name not in self.families:
            raise UnknownFamily(f"no task family {name!r}; there are {', '.join(sorted(self.families))}")
        return self.families[name]


def load_family(path: str) -> AnyFamily:
    """Import a family named `package.module:Class` and build it. Raises UnknownFamily, with the place of a
    fault in its code."""
    module_name, _, class_name = path.partition(":")
    try:
        family: AnyFamily = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnknownFamily(
            f"cannot load task family {path!r} (wanted package.module:Class): {error}"
        ) from error
    except Exception as error:
        # Its own code, which may raise anything: a person who writes a task looks for the line.
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise UnknownFamily(
            f"cannot load task family {path!r}: {type(error).__name__}: {error}{at}"
        ) from error
    missing = [part for part in PARTS if not hasattr(family, part)]
    if missing:
        raise UnknownFamily(f"{path!r} is no task family: it has no {' and no '.join(missing)} (docs/rl.md)")
    return family


def draw_distinct(source: TaskSource, family: str, level: int, count: int) -> Sequence[Task]:
    """The first `count` held-out tasks of a place whose questions differ (fewer if it has fewer)."""
    found: dict[str, Task] = {}
    for seed in range(count * 4):
        task = source.held_out(family, level, seed)
        found.setdefault(task.question, task)
        if len(found) == count:
            break
    return tuple(found.values())
