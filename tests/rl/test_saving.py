"""When a run saves, what a disk that takes nothing does to it, and what an interruption leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.checkpoint import newest_checkpoint, read_state
from rl.errors import StarvedError
from rl.fakes import FakeTrainer
from rl.ledger import Ledger
from rl.metrics import Row
from rl.plan import Plan
from rl.saving import Saved, Saver
from rl.step_log import StepLogs
from rl.types import Batch, StepReport
from tests.rl.harness import AddingSandboxes, Counting, Rig

PLAN = Plan(steps=4, groups_per_batch=2, samples_per_group=4)


class Savable(FakeTrainer):
    """`full` says at which steps the disk takes nothing."""

    def __init__(self, full: Callable[[int], bool] = lambda step: False) -> None:
        super().__init__()
        self._full = full

    async def save(self, directory: Path) -> int:
        if self._full(self.step_count):
            (directory / "state.json").symlink_to("/dev/full")
        return await super().save(directory)


class Saving:
    """A rig that saves, with what it says."""

    def __init__(self, path: Path, trainer: FakeTrainer, *, every: int = 1, **settings: Any) -> None:
        self.said: list[str] = []
        self.directory = path / "checkpoints"
        self.scores: dict[int, float] = {}
        self.rig = Rig(path, given_trainer=trainer, on_step=self._on_step, **{"plan": PLAN, **settings})
        self.logs = StepLogs.open(path, None, self.said.append)
        saved = Saved(self.directory, trainer, self.logs, lambda state: state, self.said.append)
        self.saver = Saver(saved, every_steps=every, newest=2)

    async def _on_step(self, row: Row) -> None:
        loop = self.rig.loop
        self.logs.tasks.write(loop.account_of_step())
        row |= {"heldout/benchmark": self.scores[loop.step]} if loop.step in self.scores else {}
        self.logs.metrics.write(row)
        await self.saver.after_step(loop, row)

    def run(self) -> None:
        asyncio.run(self.saver.train(self.rig.loop))

    @property
    def steps(self) -> list[int]:
        return sorted(read_state(path).step for path in self.directory.glob("step-*"))


def test_a_disk_that_is_full_for_a_while_ends_nothing(tmp_path: Path) -> None:
    saving = Saving(tmp_path, Savable(lambda step: step in (2, 3)))
    saving.run()
    assert saving.rig.loop.step == 4
    assert len(saving.said) == 2
    assert "No space left on device" in saving.said[0]
    assert "step-000001 stays the last one" in saving.said[1]
    assert saving.saver.failure is None
    assert saving.steps == [1, 4]


def test_a_disk_that_stays_full_is_remembered_until_the_end(tmp_path: Path) -> None:
    saving = Saving(tmp_path, Savable(lambda step: True))
    saving.run()
    assert saving.rig.loop.step == 4
    assert "there is none yet" in str(saving.saver.failure)
    assert newest_checkpoint(saving.directory) is None


def test_the_best_measurement_is_saved_out_of_turn_and_stays(tmp_path: Path) -> None:
    saving = Saving(tmp_path, Savable(), every=0, plan=Plan(steps=8, groups_per_batch=2, samples_per_group=4))
    saving.scores = {2: 0.5, 4: 0.4, 5: 0.5, 6: 0.1}
    saving.run()
    assert saving.steps == [2, 8]
    assert read_state(saving.directory / "step-000002").score == 0.5


def test_a_run_that_fails_saves_what_it_reached(tmp_path: Path) -> None:
    sandboxes = AddingSandboxes(lambda number: number > 60)
    saving = Saving(tmp_path, Savable(), every=0, plan=Plan(100, 2, 4), sandboxes=sandboxes)
    with pytest.raises(StarvedError):
        saving.run()
    assert saving.steps == [saving.rig.loop.step]


class Stopping(Savable):
    """Its second step is computed, and its report never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = asyncio.Event()

    async def step(self, batch: Batch) -> StepReport:
        report = await super().step(batch)
        if batch.step == 2:
            self.computed.set()
            await asyncio.Event().wait()
        return report


def test_a_step_whose_report_was_cut_off_is_in_the_checkpoint_the_books_and_the_files(tmp_path: Path) -> None:
    trainer = Stopping()
    saving = Saving(tmp_path, trainer, every=0)

    async def body() -> None:
        training = asyncio.create_task(saving.saver.train(saving.rig.loop))
        await trainer.computed.wait()
        training.cancel()
        await asyncio.wait([training])

    asyncio.run(body())
    state = read_state(saving.directory / "step-000002")
    assert state.version == 2
    trained = [group.task_key for batch in trainer.batches for group in batch.groups]
    assert not {task.key for task in state.pending} & set(trained)
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [key for line in lines for key in line["trained"]] == trained
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
    books = Ledger(state.ledger)
    books.check()
    assert books.episodes.as_dict()["trained"] == sum(batch.sample_count for batch in trainer.batches)
    assert books.tokens.as_dict()["trained"] == sum(batch.trained_count for batch in trainer.batches)


def test_a_resumed_run_goes_on_with_the_books_of_its_checkpoint(tmp_path: Path) -> None:
    first = Saving(tmp_path, Savable())
    first.run()
    state = read_state(first.directory / "step-000004")
    again = tmp_path / "again"
    again.mkdir()
    second = Rig(again, plan=Plan(6, 2, 4), curriculum=Counting(), resumed=state, books=state.ledger)
    second.curriculum.load_state_dict(state.curriculum)

    async def resume() -> None:
        await second.publisher.publish(4)
        second.loop.version = 4
        await second.loop.run()

    asyncio.run(resume())
    second.ledger.check()
    trained = second.ledger.episodes.as_dict()["trained"]
    batches = [*first.rig.trainer.batches, *second.trainer.batches]
    assert trained == sum(batch.sample_count for batch in batches)
    assert second.loop.timing.waiting_seconds > state.waiting_seconds
