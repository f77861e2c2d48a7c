"""Adapters: they alone are trained and written, and base and adapter together are the merged model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from rl.adapter_files import CONFIG_FILE, WEIGHTS_FILE, is_adapter
from rl.batching import pack_pass
from rl.config import TrainerConfig
from rl.errors import ConfigError
from rl.generator import UpdateFailed
from rl.generators.checks import check_weights
from rl.lora import merged
from rl.trainer import TorchTrainer
from rl.types import Batch
from tests.rl.test_batching import random_group, tiny_llama

RANK = 4
CONFIG = TrainerConfig(learning_rate=1e-2, warmup_steps=0, lora_rank=RANK, lora_alpha=8.0)


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """A trainer flushes them for its whole process; other tests want theirs back."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def batch(step: int = 1) -> Batch:
    trunk = np.arange(9, dtype=np.int32)
    return Batch(step, tuple(random_group(seed, trunk) for seed in range(2)))


def trained(config: TrainerConfig = CONFIG, steps: int = 3) -> TorchTrainer:
    trainer = TorchTrainer(tiny_llama(), config)
    for step in range(1, steps + 1):
        trainer.step(batch(step))
    return trainer


def written(trainer: TorchTrainer, directory: Path) -> Path:
    directory.mkdir()
    assert trainer.write_weights(directory / "model.safetensors") == trainer.step_count
    return directory


def logprobs(model: LlamaForCausalLM) -> torch.Tensor:
    model.requires_grad_(True)  # peft leaves what it has merged as it was while adapters were trained
    return TorchTrainer(model, TrainerConfig()).logprobs(pack_pass(batch().groups)).detach()


def test_base_and_adapter_are_the_merged_model(base: Path, tmp_path: Path) -> None:
    trainer = trained()
    own = trainer.logprobs(pack_pass(batch().groups)).detach()
    adapter = written(trainer, tmp_path / "adapter")
    ours = LlamaForCausalLM.from_pretrained(base)
    ours.load_state_dict(dict(merged(base, adapter)), strict=False)
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    assert torch.allclose(logprobs(ours), own, atol=1e-4, rtol=0)
    assert torch.allclose(logprobs(theirs), own, atol=1e-4, rtol=0)
    assert not torch.allclose(logprobs(tiny_llama()), own, atol=1e-2, rtol=0)


def test_before_the_first_step_it_is_the_base_model() -> None:
    own = TorchTrainer(tiny_llama(), CONFIG).logprobs(pack_pass(batch().groups)).detach()
    assert torch.equal(logprobs(tiny_llama()), own)


def test_gradients_flow_into_the_adapters_alone() -> None:
    trainer = trained()
    before = dict(tiny_llama().named_parameters())
    adapters = 0
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            adapters += 1
            assert parameter.requires_grad
        else:
            assert parameter.grad is None, name
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    assert adapters == 2 * 7 * 3  # two matrices for each of a layer's seven linear ones, in three layers


def test_only_the_adapter_is_written(base: Path, tmp_path: Path) -> None:
    adapter = written(trained(), tmp_path / "adapter")
    assert sorted(file.name for file in adapter.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    size = sum(value.numel() for value in load_file(adapter / WEIGHTS_FILE).values())
    # A layer's widths: 48 in, 48 for queries and output, 16 for keys and values, 96 within.
    assert size == 3 * RANK * (2 * (48 + 48) + 2 * (48 + 16) + 3 * (48 + 96))
    assert is_adapter(adapter)
    assert not is_adapter(base)


def test_resumed_training_is_bit_equal(tmp_path: Path) -> None:
    straight = trained(steps=2)
    assert straight.save(tmp_path) == 2
    saved = load_file(tmp_path / "model.safetensors")
    assert all("lora_" in name for name in saved)
    assert is_adapter(tmp_path)
    resumed = TorchTrainer(tiny_llama(), CONFIG)
    assert resumed.restore(tmp_path) == 2
    reports = [trainer.step(batch(3)) for trainer in (straight, resumed)]
    assert reports[0].loss == reports[1].loss
    assert reports[0].grad_norm == reports[1].grad_norm
    for (name, one), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    trained(steps=1).save(tmp_path)
    whole = TorchTrainer(tiny_llama(), TrainerConfig())
    other_rank = TorchTrainer(tiny_llama(), TrainerConfig(lora_rank=RANK + 1))
    for trainer in (whole, other_rank):
        with pytest.raises(ConfigError, match="its parameters differ"):
            trainer.restore(tmp_path)


def test_the_same_run_begins_with_the_same_adapters() -> None:
    first = TorchTrainer(tiny_llama(), CONFIG)
    torch.rand(3)
    second = TorchTrainer(tiny_llama(), CONFIG)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_base_model_is_the_reference_of_a_divergence() -> None:
    """As with a copy of the base model, but for the copy; the adapters still learn afterwards."""
    config = CONFIG.model_copy(update={"kl_coefficient": 0.1})
    trainer = TorchTrainer(tiny_llama(), config)
    assert trainer.step(batch(1)).extra["reference_kl"] == 0.0
    own = trainer.logprobs(pack_pass(batch().groups)).detach()
    report = trainer.step(batch(2))
    gap = logprobs(tiny_llama()) - own
    wanted = (torch.exp(gap) - gap - 1).mean().item()
    assert report.extra["reference_kl"] == pytest.approx(wanted, rel=1e-3)
    assert wanted > 0
    moved = trainer.logprobs(pack_pass(batch().groups)).detach()
    assert not torch.equal(moved, own)


def test_bfloat16_factors_train_adapters(tmp_path: Path) -> None:
    trainer = TorchTrainer(tiny_llama(), CONFIG, "bfloat16")
    report = trainer.step(batch())
    assert np.isfinite([report.loss, report.grad_norm]).all()
    parts = load_file(written(trainer, tmp_path / "adapter") / WEIGHTS_FILE)
    assert {value.dtype for value in parts.values()} == {torch.float32}


def test_an_adapter_that_does_not_fit_is_refused_before_it_is_loaded(base: Path, tmp_path: Path) -> None:
    adapter = written(trained(steps=1), tmp_path / "adapter")
    check_weights(adapter, base)
    parts = load_file(adapter / WEIGHTS_FILE)
    first = min(parts)
    layer = first.partition(".lora_")[0]
    for wrong in (
        {first: parts[first][:, :-1].contiguous()},
        {f"{layer}x.lora_A.weight": parts[first].clone()},
    ):
        save_file(parts | wrong, adapter / WEIGHTS_FILE)
        with pytest.raises(UpdateFailed, match="does not fit"):
            check_weights(adapter, base)
    save_file({name: value for name, value in parts.items() if name != first}, adapter / WEIGHTS_FILE)
    with pytest.raises(UpdateFailed, match="does not fit"):
        check_weights(adapter, base)
    save_file(parts, adapter / WEIGHTS_FILE)
    (adapter / CONFIG_FILE).write_text(json.dumps({"r": RANK + 1, "lora_alpha": 8}))
    with pytest.raises(UpdateFailed, match="does not fit"):
        check_weights(adapter, base)
    (adapter / CONFIG_FILE).write_text("{")
    with pytest.raises(UpdateFailed, match=CONFIG_FILE):
        check_weights(adapter, base)
