"""The trainer: finite or not applied, saved whole, and gone when its parent is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rl.batching import pack_pass
from rl.config import TrainerConfig
from rl.errors import ConfigError, NonFiniteStep, TrainerDead
from rl.precision import Precision
from rl.trainer import ADAM_BETAS, TorchTrainer
from rl.trainer_process import TrainerProcess, start_trainer
from rl.types import Batch, PackedGroup, Sample

VOCABULARY = 50
PRECISIONS: tuple[Precision, Precision] = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """A trainer flushes them for its whole process; other tests want theirs back."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def batch(step: int = 1, logprob: float = -3.9, advantage: float = 1.0, length: int = 6) -> Batch:
    """Two samples that differ in their tokens and in the sign of their advantage."""
    samples = tuple(
        Sample(
            ids=np.arange(start, start + length, dtype=np.int32) % VOCABULARY,
            loss_mask=np.ones(length, bool),
            logprobs=np.full(length, logprob, np.float32),
            advantage=sign * advantage,
        )
        for start, sign in ((0, 1.0), (20, -1.0))
    )
    return Batch(step, (PackedGroup("k", np.array([7, 8, 9], np.int32), samples),))


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_steps_raise_the_likelihood_of_what_was_rewarded(model_path: Path) -> None:
    trainer = TorchTrainer.load(model_path, TrainerConfig(learning_rate=1e-2))
    packed = pack_pass(batch().groups)
    before = trainer.logprobs(packed).detach().view(2, 6).mean(1)
    reports = [trainer.step(batch(number)) for number in range(1, 6)]
    rewarded, punished = trainer.logprobs(packed).detach().view(2, 6).mean(1) - before
    assert rewarded > 0.5
    assert punished < -0.5
    assert trainer.step_count == 5
    assert reports[0].trained_tokens == 12
    assert reports[0].forwarded_tokens == 3 + 12


def test_long_gradients_are_shortened_to_their_limit(model_path: Path) -> None:
    """What AdamW remembers after one step is its share of the gradient that it was given."""
    trainer = TorchTrainer.load(model_path, TrainerConfig(max_grad_norm=0.01))
    assert trainer.step(batch(advantage=50.0)).grad_norm > 1.0
    means = [state["exp_avg"] for state in trainer._optimizer.state.values()]
    given = torch.sqrt(torch.stack([mean.square().sum() for mean in means]).sum()) / (1 - ADAM_BETAS[0])
    assert given.item() == pytest.approx(0.01, rel=1e-3)


def test_weights_decay_at_the_rate_that_was_set(model_path: Path) -> None:
    """Where nothing is rewarded the gradient is nothing, and the decay alone moves them."""
    config = TrainerConfig(learning_rate=0.01, weight_decay=0.5, warmup_steps=0)
    trainer = TorchTrainer.load(model_path, config)
    before = weights(trainer)
    trainer.step(batch(advantage=0.0))
    for name, value in weights(trainer).items():
        assert torch.allclose(value, before[name] * (1 - 0.01 * 0.5), rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("logprob", [-104.0, 96.0])
def test_a_gap_of_100_nats_stays_finite(model_path: Path, logprob: float) -> None:
    trainer = TorchTrainer.load(model_path, TrainerConfig())
    report = trainer.step(batch(logprob=logprob))
    assert np.isfinite([report.loss, report.grad_norm, report.mismatch_kl, report.mean_ratio]).all()
    assert report.clipped_fraction == (1.0 if logprob < 0 else 0.0)
    assert all(bool(torch.isfinite(value).all()) for value in weights(trainer).values())


def test_a_token_without_sampler_logprob_is_masked_and_counted(model_path: Path) -> None:
    trainer = TorchTrainer.load(model_path, TrainerConfig())
    given = batch()
    given.groups[0].samples[0].logprobs[2] = np.nan
    report = trainer.step(given)
    assert report.extra["masked_tokens"] == 1
    assert report.trained_tokens == 11
    assert np.isfinite(report.loss)


@pytest.mark.parametrize("advantage", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(model_path: Path, advantage: float) -> None:
    trainer = TorchTrainer.load(model_path, TrainerConfig(learning_rate=1e-2))
    trainer.step(batch(1))
    before = weights(trainer)
    with pytest.raises(NonFiniteStep):
        trainer.step(batch(2, advantage=advantage))
    assert equal(before, weights(trainer))
    assert trainer.step_count == 1
    trainer.step(batch(2))
    assert all(bool(torch.isfinite(value).all()) for value in weights(trainer).values())


def test_restored_training_is_bit_equal(model_path: Path, tmp_path: Path) -> None:
    straight = TorchTrainer.load(model_path, TrainerConfig(learning_rate=1e-2))
    straight.step(batch(1))
    saved = tmp_path / "saved"
    saved.mkdir()
    assert straight.save(saved) == 1
    straight.step(batch(2))
    resumed = TorchTrainer.load(model_path, TrainerConfig(learning_rate=1e-2))
    assert resumed.restore(saved) == 1
    resumed.step(batch(2))
    assert equal(weights(straight), weights(resumed))


def test_written_weights_load_again(model_path: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer.load(model_path, TrainerConfig(learning_rate=1e-2))
    trainer.step(batch(1))
    assert trainer.write_weights(tmp_path / "w.safetensors") == 1
    assert equal(weights(trainer), load_file(tmp_path / "w.safetensors"))


def test_bfloat16_factors_step_as_float32_ones_do(model_path: Path, tmp_path: Path) -> None:
    """Weights stay float32 and move the same way; what is published is half as large."""
    plain, lower = (TorchTrainer.load(model_path, TrainerConfig(), name) for name in PRECISIONS)
    before = weights(plain)
    exact, rounded = (trainer.step(batch(1)) for trainer in (plain, lower))
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)
    assert all(value.dtype == torch.float32 for value in weights(lower).values())
    moves = [
        torch.cat([(after - before[name]).flatten() for name, after in weights(trainer).items()])
        for trainer in (plain, lower)
    ]
    assert torch.nn.functional.cosine_similarity(moves[0], moves[1], dim=0) > 0.9
    lower.write_weights(tmp_path / "w.safetensors")
    assert {value.dtype for value in load_file(tmp_path / "w.safetensors").values()} == {torch.bfloat16}


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        TorchTrainer.load(tmp_path / "nowhere", TrainerConfig())


def test_the_process_trains_saves_and_reports_errors(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with start_trainer(tmp_path / "trainer.log") as trainer:
            with pytest.raises(ConfigError, match="nowhere"):
                await trainer.load(tmp_path / "nowhere", TrainerConfig())
            await trainer.load(model_path, TrainerConfig(learning_rate=1e-2))
            report = await trainer.step(batch(1))
            assert report.trained_tokens == 12
            with pytest.raises(NonFiniteStep):
                await trainer.step(batch(2, advantage=float("nan")))
            assert await trainer.write_weights(tmp_path / "w.safetensors") == 1
            (tmp_path / "saved").mkdir()
            assert await trainer.save(tmp_path / "saved") == 1
            pid = trainer.pid
        assert not process_exists(pid)

    asyncio.run(body())


def test_saving_does_not_wait_for_a_step_under_way(model_path: Path, tmp_path: Path) -> None:
    """A step of many passes is begun; the save that follows is answered first, with the step before."""

    async def body() -> None:
        async with start_trainer(tmp_path / "trainer.log") as trainer:
            await trainer.load(model_path, TrainerConfig(max_pass_tokens=1))
            (tmp_path / "saved").mkdir()
            long = Batch(1, batch(length=40).groups * 400)
            done: list[str] = []
            async with asyncio.TaskGroup() as tasks:
                step = tasks.create_task(trainer.step(long))
                step.add_done_callback(lambda _: done.append("step"))
                await asyncio.sleep(0)
                assert await trainer.save(tmp_path / "saved") == 0
                done.append("save")
            assert done == ["save", "step"]

    asyncio.run(body())


def test_a_killed_trainer_ends_the_waiting_call(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        async with start_trainer(tmp_path / "trainer.log") as trainer:
            await trainer.load(model_path, TrainerConfig(max_pass_tokens=1))
            async with asyncio.TaskGroup() as tasks:
                step = tasks.create_task(kill_soon(trainer))
            assert isinstance(step.result(), TrainerDead)
            with pytest.raises(TrainerDead, match="code -9"):
                await trainer.step(batch(2))

    async def kill_soon(trainer: TrainerProcess) -> Exception | None:
        waiting = asyncio.ensure_future(trainer.step(Batch(1, batch(length=40).groups * 400)))
        await asyncio.sleep(0)
        os.kill(trainer.pid, signal.SIGKILL)
        try:
            await waiting
        except TrainerDead as death:
            return death
        return None

    asyncio.run(body())


PARENT = """
import asyncio, pathlib, sys
from rl.config import TrainerConfig
from rl.errors import ConfigError
from rl.trainer_process import start_trainer

async def main():
    async with start_trainer(pathlib.Path(sys.argv[1])) as trainer:
        try:
            await trainer.load(pathlib.Path("/nowhere"), TrainerConfig())
        except ConfigError:  # it has imported what it needs, however long that took
            print(trainer.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_trainer_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "trainer.log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        handle = os.pidfd_open(pid)
        parent.kill()
    wait_for_exit(handle, 20.0)


def wait_for_exit(handle: int, seconds: float) -> None:
    import select

    readable, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    assert readable, "the process is still there"


def process_exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
