"""Every loss through the trainer: packed in one pass or several, its gradient is the unpacked formula's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from rl.batching import plan_passes
from rl.config import TrainerConfig
from rl.losses.recipes import RECIPES, Totals
from rl.trainer import TorchTrainer
from rl.types import Batch, PackedGroup, Sample
from tests.rl.loss_reference import Row, reference_loss
from tests.rl.test_batching import random_group, tiny_llama

NAMES = list(RECIPES)


def batch() -> Batch:
    trunk = np.arange(5, dtype=np.int32)
    return Batch(1, tuple(random_group(seed, trunk) for seed in range(2)))


def sampled_logprobs(model: LlamaForCausalLM, group: PackedGroup, sample: Sample) -> Tensor:
    """The long way: the sample behind its own prompt; the log-probabilities of its loss tokens."""
    row = torch.from_numpy(np.concatenate([group.prompt_ids, sample.ids])).long()
    start = len(group.prompt_ids)
    logits = model(input_ids=row[None]).logits[0, start - 1 : -1]
    every = functional.log_softmax(logits, -1).gather(1, row[start:, None])[:, 0]
    return every[torch.from_numpy(sample.loss_mask)]


def unpacked_loss(
    model: LlamaForCausalLM, reference: LlamaForCausalLM, given: Batch, config: TrainerConfig
) -> Tensor:
    rows, now = [], []
    for group in given.groups:
        for sample in group.samples:
            logprobs = sampled_logprobs(model, group, sample).double()
            base = sampled_logprobs(reference, group, sample).tolist()
            held = logprobs.tolist()
            rows.append(Row(held, sample.logprobs[sample.loss_mask].tolist(), base, held, sample.advantage))
            now.append(list(logprobs))
    return reference_loss(rows, now, [row.now for row in rows], config.objective)


@pytest.mark.parametrize("max_pass_tokens", [1, 10_000])
@pytest.mark.parametrize("name", NAMES)
def test_packed_loss_and_gradients_equal_the_formula(name: str, max_pass_tokens: int) -> None:
    config = TrainerConfig.model_validate({"loss": name, "kl_coefficient": 0.5})
    given = batch()
    moved = tiny_llama()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.05)
    trainer = TorchTrainer(tiny_llama(), config)
    trainer.model.load_state_dict(moved.state_dict())
    loss = unpacked_loss(moved, tiny_llama(), given, config)
    loss.backward()
    passes = list(plan_passes(given.groups, max_pass_tokens))
    totals = Totals(given.trained_count, given.sample_count)
    sums = [trainer.accumulate(packed, totals) for packed in passes]
    assert sum(part["loss"] for part in sums) == pytest.approx(loss.item(), abs=1e-5)
    assert sum(part["reference_kl"] for part in sums) > 0
    for (place, wanted), got in zip(moved.named_parameters(), trainer.model.parameters(), strict=True):
        assert wanted.grad is not None
        assert got.grad is not None
        assert torch.allclose(got.grad, wanted.grad, atol=1e-5, rtol=1e-4), place


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_finite_and_repeat_to_the_bit(name: str) -> None:
    config = TrainerConfig.model_validate({"loss": name, "learning_rate": 1e-3})
    runs = []
    for _ in range(2):
        trainer = TorchTrainer(tiny_llama(), config)
        runs.append([trainer.step(batch()) for _ in range(2)])
        assert all(bool(torch.isfinite(value).all()) for value in trainer.model.parameters())
    assert [report.loss for report in runs[0]] == [report.loss for report in runs[1]]
    assert "reference_kl" not in runs[0][0].extra


def test_the_reference_is_the_model_that_the_run_began_with(tmp_path: Path) -> None:
    """The divergence is nothing before the first step, and is measured from the base after a restart."""
    config = TrainerConfig(learning_rate=1e-2, kl_coefficient=0.1)
    straight = TorchTrainer(tiny_llama(), config)
    assert straight.step(batch()).extra["reference_kl"] == 0.0
    straight.save(tmp_path)
    resumed = TorchTrainer(tiny_llama(), config)
    resumed.restore(tmp_path)
    reports = [trainer.step(batch()) for trainer in (straight, resumed)]
    assert reports[0].extra["reference_kl"] == reports[1].extra["reference_kl"] > 0
    assert reports[0].loss == reports[1].loss


def test_a_missing_logprob_is_left_out_of_every_loss() -> None:
    for name in NAMES:
        given = batch()
        sample = given.groups[0].samples[0]
        sample.logprobs[np.flatnonzero(sample.loss_mask)[0]] = np.nan
        trainer = TorchTrainer(tiny_llama(), TrainerConfig.model_validate({"loss": name}))
        report = trainer.step(given)
        assert report.extra["masked_tokens"] == 1
        assert report.trained_tokens == given.trained_count - 1
        assert np.isfinite([report.loss, report.grad_norm]).all()
