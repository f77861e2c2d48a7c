"""What is measured: the six benchmark kinds in equal shares, and a fixed mix of every family and level."""

from __future__ import annotations

from dataclasses import dataclass

from rl.tasks.source import TaskSource, draw_distinct
from rl.types import Task

BENCHMARK: dict[str, tuple[str, int]] = {
    "sums_2": ("sums", 2),
    "sums_3": ("sums", 3),
    "sums_5": ("sums", 4),
    "words_1": ("words", 1),
    "words_2": ("words", 6),
    "letters": ("letters", 5),
}
"""Kind → (family, level): sums of two, three and five numbers from 10 to 999, one- and two-step word
problems, letter counts with no hint. Declared before any training; a change starts a
new series of results."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """`benchmark` maps each kind to its tasks; `mix` holds the tasks of every family and level."""

    benchmark: dict[str, tuple[Task, ...]]
    mix: tuple[Task, ...]

    def tasks(self) -> tuple[Task, ...]:
        """Each task once, benchmark first."""
        found = {task.key: task for tasks in self.benchmark.values() for task in tasks}
        found.update({task.key: task for task in self.mix})
        return tuple(found.values())


def build_held_out(source: TaskSource, *, per_kind: int = 16, per_level: int = 2) -> HeldOut:
    """The held-out tasks: `per_kind` of each benchmark kind, `per_level` of each family and level."""
    benchmark = {
        kind: tuple(draw_distinct(source, family, level, per_kind))
        for kind, (family, level) in BENCHMARK.items()
        if family in source.families
    }
    mix = tuple(
        task
        for family, count in source.levels().items()
        for level in range(count)
        for task in draw_distinct(source, family, level, per_level)
    )
    return HeldOut(benchmark, mix)
