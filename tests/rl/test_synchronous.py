"""Bound 0 is synchronous training: on the model of the demonstration its losses are the same to the bit."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.batching import pack_group
from rl.config import TrainerConfig
from rl.dialogue import STYLE
from rl.fakes import FakeTrainer
from rl.ledger import Fate
from rl.model import SMOLLM2, ChatTokenizer, prepare_model
from rl.plan import Plan
from rl.trainer import TorchTrainer
from rl.types import Batch, Group, PackedGroup, StepReport
from tests.rl.harness import Counting, Rig

ROOT = Path(__file__).parents[2]
PLAN = Plan(steps=2, groups_per_batch=2, samples_per_group=2)
STYLE_WITHOUT_SHOTS = replace(STYLE, shots=())  # a short prompt: this is no test of what the model can do
CONFIG = TrainerConfig(learning_rate=1e-4, warmup_steps=0, threads=1)


class RealTrainer(FakeTrainer):
    """Takes its steps with the real model, in this process."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.reports: list[StepReport] = []
        self._torch = TorchTrainer.load(model, CONFIG)

    async def step(self, batch: Batch) -> StepReport:
        await super().step(batch)
        self.reports.append(await asyncio.to_thread(self._torch.step, batch))
        return self.reports[-1]


@pytest.fixture
def model() -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield prepare_model(SMOLLM2, ROOT / "models")
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    gc.collect()


def make_rig(path: Path, model: Path) -> tuple[Rig, RealTrainer]:
    path.mkdir()
    trainer = RealTrainer(model)
    rig = Rig(
        path,
        plan=PLAN,
        bound=0,
        tokenizer=ChatTokenizer(model),
        given_trainer=trainer,
        style=STYLE_WITHOUT_SHOTS,
    )
    return rig, trainer


async def train_plainly(rig: Rig) -> None:
    """The loop that a textbook has: play a batch, train on it, make the weights live, play the next one."""
    curriculum = Counting()
    for step in range(1, PLAN.steps + 1):
        batch: list[PackedGroup] = []
        while len(batch) < PLAN.groups_per_batch:
            task = curriculum.next_task()
            members = await asyncio.gather(*(rig.player.play(task) for _ in range(PLAN.samples_per_group)))
            for member in members:
                rig.ledger.settle(member.account, Fate.EVALUATED)
            group = Group(task, rig.player.prompt(task), tuple(member.episode for member in members))
            packed = pack_group(group)
            batch += [packed] if packed is not None else []
        await rig.trainer.step(Batch(step, tuple(batch)))
        await rig.publisher.publish(step)


def test_bound_0_reproduces_the_losses_of_synchronous_training(tmp_path: Path, model: Path) -> None:
    asynchronous, seen = make_rig(tmp_path / "loop", model)
    asyncio.run(asynchronous.loop.run())
    assert [row["off_policy/max"] for row in asynchronous.rows] == [0.0] * PLAN.steps
    reports = seen.reports
    keys = asynchronous.trained
    del asynchronous, seen  # two copies of the model with its moments would be 4 GB
    plain, trainer = make_rig(tmp_path / "plain", model)
    asyncio.run(train_plainly(plain))
    assert keys == plain.trained
    for name in ("loss", "grad_norm", "mean_ratio", "mismatch_kl", "trained_tokens", "extra"):
        found = [getattr(report, name) for report in reports]
        assert found == [getattr(report, name) for report in trainer.reports], name
    assert len({report.loss for report in reports}) == PLAN.steps
