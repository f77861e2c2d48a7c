"""Checkpoints and published weights: whole or not there, and old ones go."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl.checkpoint import LoopState, newest_checkpoint, read_state, write_checkpoint
from rl.config import TrainerConfig
from rl.curriculum import SolveRateBands
from rl.errors import CheckpointFailed, ConfigError, TrainerDead
from rl.fakes import FakeTrainer
from rl.ledger import Ledger
from rl.tasks import TaskSource
from rl.tasks.sums import Sums
from rl.trainer import TorchTrainer
from rl.types import Task
from rl.weights import PREFIX, weights_directory
from tests.rl.test_batching import tiny_llama

TASK = Task("train/sums/0/1", "sums", 0, "What is 1 + 2?", "3")


def state(step: int, score: float | None = None) -> LoopState:
    return LoopState(
        step,
        step,
        {"given": 5},
        pending=(TASK,),
        observed=(TASK.key,),
        dropped={"train/sums/0/0": "stale"},
        before={"overall": 0.1, "families": {"sums": 0.1}},
        wall_seconds=12.5,
        ledger=Ledger().state_dict(),
        lengths={"metrics.jsonl": 7},
        score=score,
    )


def write(
    directory: Path, step: int, *, trainer: FakeTrainer | None = None, score: float | None = None
) -> Path:
    """A checkpoint of this step."""
    return asyncio.run(write_checkpoint(directory, trainer or FakeTrainer(), lambda _: state(step, score)))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


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
    for step in (1, 2, 999_999, 1_000_000):
        write(tmp_path, step)
    assert names(tmp_path) == ["step-1000000", "step-999999"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-1000000"


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step, score in enumerate([0.2, 0.7, None, 0.7, 0.5, 0.6, None], 1):
        write(tmp_path, step, score=score)
    assert names(tmp_path) == ["step-000004", "step-000006", "step-000007"]


def test_a_step_that_is_saved_is_not_touched_again(tmp_path: Path) -> None:
    first = write(tmp_path, 1)
    inode = (first / "state.json").stat().st_ino
    assert write(tmp_path, 1, score=0.5) == first
    assert (first / "state.json").stat().st_ino == inode
    assert names(tmp_path) == ["step-000001"]


class FullDisk(FakeTrainer):
    """Leaves a file on a device that is always full, under the name that is written next."""

    async def save(self, directory: Path) -> int:
        (directory / "state.json").symlink_to("/dev/full")
        return await super().save(directory)


class FullAtOnce(FakeTrainer):
    """Finds the disk full itself."""

    async def save(self, directory: Path) -> int:
        await asyncio.to_thread(Path("/dev/full").write_text, "x")
        return 1


@pytest.mark.parametrize("trainer", [FullDisk(), FullAtOnce()])
def test_a_full_disk_is_one_clear_line_and_keeps_what_was_there(tmp_path: Path, trainer: FakeTrainer) -> None:
    write(tmp_path, 1)
    with pytest.raises(CheckpointFailed) as caught:
        write(tmp_path, 2, trainer=trainer)
    message = str(caught.value)
    assert "No space left on device" in message
    assert "step-000001 stays the last one" in message
    assert str(tmp_path) in message
    assert "\n" not in message
    assert names(tmp_path) == ["step-000001"]
    assert names(write(tmp_path, 2).parent) == ["step-000001", "step-000002"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointFailed, match=r"checkpoints: .*; there is none yet"):
        write(tmp_path / "checkpoints", 1)


def test_the_real_trainer_tells_of_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk's: the same write fails at the same place."""
    trainer = TorchTrainer(tiny_llama(), TrainerConfig())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointFailed, match="File too large"):
            trainer.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert trainer.save(tmp_path) == 0


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


def test_another_format_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, 1) / "state.json"
    for content, found in (({"step": 1}, "format 1"), ({"format": 3, "step": 1}, "format 3")):
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"step-000001 has {found}, and this version reads 2") as caught:
            read_state(file.parent)
        assert "without --resume" in str(caught.value)


def test_a_file_that_lost_its_end_is_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 1)
    length = (checkpoint / "trainer.json").stat().st_size
    os.truncate(checkpoint / "trainer.json", 3)
    with pytest.raises(ConfigError, match=f"damaged: trainer.json has 3 of its {length} bytes; remove it"):
        read_state(checkpoint)


def test_what_killed_runs_left_half_written_goes(tmp_path: Path) -> None:
    for name in (".partial", ".removed-step-000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    assert newest_checkpoint(tmp_path) is None
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-000003"]


def test_random_states_come_back(tmp_path: Path) -> None:
    trainer = TorchTrainer(tiny_llama(), TrainerConfig())
    torch.manual_seed(3)
    trainer.save(tmp_path)
    drawn = torch.rand(3)
    trainer.restore(tmp_path)
    assert torch.equal(torch.rand(3), drawn)


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
