"""The benchmark kinds in one turn: the first block is run once, and what it prints is judged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl.config import load
from rl.dialogue import Dialogue
from rl.generators.fake import ByteTokenizer
from rl.rollout import Limits, Rollout
from rl.run import task_source
from rl.tasks import BENCHMARK, TaskSource, build_held_out, shipped_families
from rl.tasks.one_turn import PREFIX, one_turn_families
from rl.types import Scored, StopReason, Truncated
from tests.rl.box_kit import fake_sandboxes
from tests.rl.test_rollout import Recorder

SOURCE = TaskSource(one_turn_families())
CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_block_is_judged_by_what_it_prints(tmp_path: Path) -> None:
    async def body() -> None:
        async with fake_sandboxes(tmp_path) as sandboxes:
            for kind in BENCHMARK:
                task = SOURCE.train(PREFIX + kind, 0, 1)
                turns = {
                    f"print({task.answer})\n```": Scored(1.0),
                    f"x = 5\nprint('It is', {task.answer})\n```": Scored(1.0),
                    f"print({task.answer} + 1)\n```": Scored(0.0),
                    f"{task.answer}\n```": Scored(0.0),
                    f"print({task.answer}); raise SystemExit(3)\n```": Scored(0.0),
                    "print(\0)\n```": Scored(0.0),
                    f"print({task.answer})": Scored(0.0),
                }
                for turn, outcome in turns.items():
                    rollout = Rollout(
                        Recorder(turn), sandboxes, Dialogue(ByteTokenizer()), SOURCE, limits=LIMITS
                    )
                    assert (await rollout.run(task)).outcome == outcome, turn

    asyncio.run(body())


LIMITS = Limits(max_turns=1, turn_tokens=4000, context_tokens=40_000)


def test_a_block_that_is_cut_earns_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with fake_sandboxes(tmp_path) as sandboxes:
            limits = Limits(max_turns=1, turn_tokens=6, context_tokens=40_000)
            cut = Recorder("print(1 + 2)\n```")
            rollout = Rollout(cut, sandboxes, Dialogue(ByteTokenizer()), SOURCE, limits=limits)
            episode = await rollout.run(SOURCE.train(f"{PREFIX}sums_2", 0, 1))
            assert episode.outcome == Truncated(StopReason.MAX_TOKENS, 0.0)

    asyncio.run(body())


def test_there_is_one_for_each_benchmark_kind_and_they_ask_the_same() -> None:
    assert list(SOURCE.levels()) == [PREFIX + kind for kind in BENCHMARK]
    assert set(SOURCE.levels()) <= set(shipped_families())
    held_out = build_held_out(SOURCE, per_level=3)
    assert len(held_out.mix) == 3 * len(BENCHMARK)
    question = next(task.question for task in held_out.mix if task.family.endswith("sums_5"))
    assert question.count("+") == 4


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_settings_that_ship_name_tasks_that_there_are(name: str) -> None:
    config = load(CONFIGS / name, {})
    assert list(task_source(config).families) == config.families
