"""Checkpoints and published weights: whole or not there, and old ones go."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.checkpoint import LoopState, newest_checkpoint, read_state, write_checkpoint
from rl.curriculum import SolveRateBands
from rl.errors import ConfigError, TrainerDead
from rl.fakes import FakeTrainer
from rl.tasks import Sums, TaskSource
from rl.types import Task
from rl.weights import PREFIX, weights_directory

TASK = Task("train/sums/0/1", "sums", 0, "What is 1 + 2?", "3")


def state(step: int) -> LoopState:
    before = {"overall": 0.1, "families": {"sums": 0.1}}
    return LoopState(step, step, {"given": 5}, (TASK,), (TASK.key,), before, 12.5)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    asyncio.run(write_checkpoint(tmp_path, FakeTrainer(), lambda version: state(3)))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-000003"
    assert read_state(newest) == state(3)


def test_the_loop_is_asked_for_the_state_of_the_saved_version(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    trainer.step_count = 7
    asked: list[int] = []

    def state_at(version: int) -> LoopState:
        asked.append(version)
        return state(version)

    asyncio.run(write_checkpoint(tmp_path, trainer, state_at))
    assert asked == [7]


def test_only_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        asyncio.run(write_checkpoint(tmp_path, FakeTrainer(), lambda version, step=step: state(step)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000011"]


class DyingTrainer(FakeTrainer):
    """Dies in the middle of saving."""

    async def save(self, directory: Path) -> int:
        await super().save(directory)
        raise TrainerDead("staged")


def test_a_save_that_fails_half_way_does_not_count(tmp_path: Path) -> None:
    asyncio.run(write_checkpoint(tmp_path, FakeTrainer(), lambda version: state(1)))
    with pytest.raises(TrainerDead):
        asyncio.run(write_checkpoint(tmp_path, DyingTrainer(), lambda version: state(2)))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-000001"
    asyncio.run(write_checkpoint(tmp_path, FakeTrainer(), lambda version: state(2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "step-000001"
    broken.mkdir()
    (broken / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="step-000001"):
        read_state(broken)


def test_the_curriculum_draws_the_same_tasks_after_a_checkpoint(tmp_path: Path) -> None:
    curriculum = SolveRateBands(TaskSource([Sums()]), ["sums"], seed=3)
    for _ in range(20):
        task = curriculum.next_task()
        curriculum.observe(task, [1.0, 0.0, 1.0])
    saved = LoopState(1, 1, curriculum.state_dict())
    asyncio.run(write_checkpoint(tmp_path, FakeTrainer(), lambda version: saved))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    resumed = SolveRateBands(TaskSource([Sums()]), ["sums"], seed=99)
    resumed.load_state_dict(read_state(newest).curriculum)
    assert resumed.state_dict() == curriculum.state_dict()
    assert [resumed.next_task() for _ in range(20)] == [curriculum.next_task() for _ in range(20)]


def test_weights_of_killed_runs_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    orphan, living = tmp_path / f"{PREFIX}{ended.pid}-x", tmp_path / f"{PREFIX}{os.getppid()}-x"
    orphan.mkdir()
    living.mkdir()

    async def body() -> None:
        async with weights_directory(tmp_path) as directory:
            assert directory.is_dir()
            assert not orphan.exists()
            assert living.exists()
        assert not directory.exists()

    asyncio.run(body())
