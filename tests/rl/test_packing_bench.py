"""What packing is measured against computes the same; and the measurement is of a batch like a run's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from rl.batching import plan_passes
from rl.cli import parser
from rl.config import TrainerConfig, load
from rl.errors import ConfigError
from rl.losses.recipes import Totals
from rl.model import SMOLLM2, build_tiny_model, prepare_model
from rl.packing_bench import Asked, example_batch, measure, packing
from rl.padding import Padded, plain_attention
from rl.single_passes import one_by_one, padded_passes
from rl.trainer import TorchTrainer
from rl.types import Batch
from tests.rl.test_batching import random_group, tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """A trainer flushes them for its whole process; other tests want theirs back."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packaged = prepare_model(SMOLLM2, ROOT / "models")
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", packaged)


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    return found


def test_all_ways_have_the_same_gradients() -> None:
    groups = tuple(random_group(seed, np.arange(30, dtype=np.int32)) for seed in range(3))
    batch = Batch(1, groups)
    totals = Totals(batch.trained_count, batch.sample_count)
    trainer = TorchTrainer(tiny_llama(), TrainerConfig())
    for packed in plan_passes(groups, 10_000):
        trainer.accumulate(packed, totals)
    wanted = gradients(trainer)
    for packed in one_by_one(groups):
        trainer.accumulate(packed, totals)
    single = gradients(trainer)
    with plain_attention(trainer.model):
        chosen = list(padded_passes(groups, 200))
        padded = Padded(trainer.model, TrainerConfig().objective, "float32")
        computed = sum(padded.accumulate(each, totals) for each in chosen)
    by_padding = gradients(trainer)
    assert 1 < len(chosen) < batch.sample_count
    assert computed > batch.unshared_count
    assert wanted.keys() == single.keys() == by_padding.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(single[name], gradient, atol=1e-5, rtol=1e-4), name
        assert torch.allclose(by_padding[name], gradient, atol=1e-5, rtol=1e-4), name


def test_a_padded_pass_holds_what_fits() -> None:
    groups = [random_group(seed, np.arange(20, dtype=np.int32)) for seed in range(3)]
    for limit in (1, 100, 10_000):
        passes = list(padded_passes(groups, limit))
        assert [sample.ids.tolist() for each in passes for group in each for sample in group.samples] == [
            sample.ids.tolist() for group in groups for sample in group.samples
        ]
        for each in passes:
            longest = max(len(group.prompt_ids) + len(group.samples[0].ids) for group in each)
            assert len(each) == 1 or longest * len(each) <= limit


def test_the_command_measures_a_batch_like_the_demonstrations(tiny: Path, tmp_path: Path) -> None:
    settings, figures = tmp_path / "settings.toml", tmp_path / "figures.json"
    settings.write_text(
        f'model = "{tiny}"\nprecision = "float32"\ngroups_per_batch = 2\nsamples_per_group = 4\n'
    )
    asked = ["packing", str(settings), "--rounds", "1", "--json", str(figures)]
    console = Console(width=200, record=True)
    found = packing(parser().parse_args(asked), console)
    assert [each.how for each in found] == ["packed", "padded", "one by one"]
    computed = [each.computed for each in found]
    assert computed[0] < computed[2] <= computed[1]
    assert len({each.trained for each in found}) == 1
    assert [way["computed"] for way in json.loads(figures.read_text())["ways"]] == computed
    assert "one by one" in console.export_text()


def test_the_batch_is_the_same_for_the_same_seed(tiny: Path) -> None:
    config = load(ROOT / "configs" / "demo.toml", {})
    batch = example_batch(config, tiny)
    again = example_batch(config, tiny)
    assert len(batch.groups) == config.groups_per_batch
    assert {len(group.samples) for group in batch.groups} == {config.samples_per_group}
    for group, other in zip(batch.groups, again.groups, strict=True):
        assert group.prompt_ids.tolist() == other.prompt_ids.tolist()
        for sample, twin in zip(group.samples, other.samples, strict=True):
            assert sample.ids.tolist() == twin.ids.tolist()
    assert batch.unshared_count > 5 * batch.trained_count


def test_the_fastest_round_counts() -> None:
    batch = Batch(1, tuple(random_group(seed, np.arange(9, dtype=np.int32)) for seed in range(2)))
    config = TrainerConfig()
    trainer = TorchTrainer(tiny_llama(), config)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = measure(trainer, batch, Asked(config, "float32", 2))
    assert found
    assert all(each.seconds > 0 for each in found)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.step_count == 0


def test_what_cannot_be_measured_is_named(tmp_path: Path, tiny: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f'model = "{tiny}"\nfamilies = ["my_task:Repair"]\n')
    with pytest.raises(ConfigError, match="my_task:Repair"):
        packing(parser().parse_args(["packing", str(settings)]), Console())
    with pytest.raises(ConfigError, match="--rounds = 0"):
        packing(parser().parse_args(["packing", "--rounds", "0"]), Console())
