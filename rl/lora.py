"""Low-rank adapters: they alone are trained and travel, and the generator adds them to the base model.

A layer's weights are W + (alpha / rank) · B · A. W is the base model's and never changes; A and B are
trained, and B begins at zero. On disk an adapter is what peft writes: other programs load it onto the same
base model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl.adapter_files import CONFIG_FILE, HIGH, LOW, PREFIX, WEIGHTS_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0
"""Of the matrices A: a run of the same seed begins with the same ones."""


def add_adapters(model: PreTrainedModel, rank: int, alpha: float) -> None:
    """Puts an adapter beside every linear layer but the output layer; all else takes no gradient any more."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", lora_dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        inject_adapter_in_model(config, model)


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """The base model for the length of the block: the reference of a divergence, without a copy of it."""
    layers = _adapted(model)
    for layer in layers.values():
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def write_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Writes peft's two files into an existing directory, numbers as float32."""
    tensors: dict[str, Tensor] = {}
    scales = set()
    for name, layer in _adapted(model).items():
        tensors[f"{PREFIX}{name}{LOW}"] = layer.lora_A["default"].weight.detach().contiguous()
        tensors[f"{PREFIX}{name}{HIGH}"] = layer.lora_B["default"].weight.detach().contiguous()
        scales.add((layer.r["default"], layer.lora_alpha["default"]))
    (rank, alpha), *_ = scales
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config.name_or_path,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in _adapted(model)}),
    }
    # It may be a link to the base model's file of that name.
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def merged(base: Path, adapter: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model directory `base`, by name, with the adapter added where it has a part; sums
    are computed in float32."""
    config = json.loads((adapter / CONFIG_FILE).read_text())
    scale = config["lora_alpha"] / config["r"]
    parts = load_file(adapter / WEIGHTS_FILE)
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                tensor = tensors.get_tensor(name)
                layer = f"{PREFIX}{name.removesuffix('.weight')}"
                if f"{layer}{LOW}" in parts:
                    low, high = parts[f"{layer}{LOW}"], parts[f"{layer}{HIGH}"]
                    tensor = (tensor.float() + scale * (high.float() @ low.float())).to(tensor.dtype)
                yield name, tensor


def _adapted(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
