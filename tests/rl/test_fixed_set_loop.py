"""A loop over a fixed set, in which some problems are trivial and some out of reach, stopped and resumed."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

from rl.checkpoint import newest_checkpoint, read_state, write_checkpoint
from rl.curriculum import BandSettings, SolveRateBands
from rl.generators.fake import sums_reply
from rl.plan import Plan
from rl.tasks import TaskSource
from rl.tasks.base import Problem
from rl.tasks.source import is_held_out
from rl.tasks.sums import Sums
from tests.rl.harness import Rig

QUESTIONS = [f"What is {number} + 7?" for number in range(10, 50)]
TRAINED = [each for each in QUESTIONS if not is_held_out(each)]
HARD = set(TRAINED[:12])
MIDDLE = set(TRAINED[24:])
BAND = BandSettings(memory=4.0, rest=2)


class Fixed(Sums):
    """Sums of a fixed set: the first have an answer that nobody finds."""

    levels = ("all",)

    def __init__(self, questions: list[str] = QUESTIONS) -> None:
        self._questions = questions

    def problems(self, level: int) -> tuple[Problem, ...]:
        return tuple(Problem(each, "-1" if each in HARD else _sum(each)) for each in self._questions)

    def make(self, level: int, rng: random.Random) -> Problem:
        return rng.choice(self.problems(level))


def _sum(question: str) -> str:
    return str(sum(map(int, re.findall(r"\d+", question))))


def fixed(settings: BandSettings = BAND, questions: list[str] = QUESTIONS) -> SolveRateBands:
    return SolveRateBands(TaskSource([Fixed(questions)]), ["sums"], seed=1, settings=settings)


def reply(dialogue: str, version: int, rng: random.Random) -> str:
    asked = re.findall(r"What is [0-9+ ]+\?", dialogue)[-1]
    return sums_reply(lambda version: 0.5 if asked in MIDDLE else 1.0)(dialogue, version, rng)


def test_a_loop_that_is_stopped_and_resumed_keeps_what_is_known_of_each_task(tmp_path: Path) -> None:
    plan, saved = Plan(24, 2, 4, replace_silent=True), tmp_path / "checkpoints"
    first = Rig(tmp_path, plan=plan, reply=reply, curriculum=fixed())

    async def until_stopped() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(first.loop.run())
            while first.loop.step < 12:
                await asyncio.sleep(0)
            running.cancel()
        await write_checkpoint(saved, first.trainer, first.loop.state)

    asyncio.run(until_stopped())
    checkpoint = newest_checkpoint(saved)
    assert checkpoint is not None
    state = read_state(checkpoint)
    curriculum = fixed()
    curriculum.load_state_dict(state.curriculum)
    assert curriculum.state_dict() == first.curriculum.state_dict()
    second = Rig(tmp_path, plan=plan, curriculum=curriculum, reply=reply, resumed=state, seed=7)

    async def resume() -> None:
        async with asyncio.timeout(20):
            await second.go_on(checkpoint)

    asyncio.run(resume())
    trained = first.trained + second.trained
    assert len(trained) == len(set(trained)) == 48
    assert second.rows[-1]["curriculum/rested"] > 0
    assert second.rows[-1]["curriculum/rested"] >= first.rows[-1]["curriculum/rested"]
