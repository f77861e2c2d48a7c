"""The files of an adapter, and whether they fit a model. Reads heads alone, and needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
LOW, HIGH = ".lora_A.weight", ".lora_B.weight"


def is_adapter(directory: Path) -> bool:
    """Whether a directory of weights holds an adapter, which goes on top of a base model."""
    return (directory / WEIGHTS_FILE).is_file()


def misfit(
    directory: Path,
    parts: Mapping[str, tuple[int, ...]],
    base: Mapping[str, tuple[int, ...]],
) -> str | None:
    """What of an adapter's tensors, by name and shape, does not fit the base model's; None where all fit."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
        rank, _ = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{CONFIG_FILE}: {error!r}"
    layers = {name.removesuffix(LOW).removesuffix(HIGH) for name in parts}
    for layer in sorted(layers):
        whole = base.get(f"{layer.removeprefix(PREFIX)}.weight", ())
        found = (parts.get(f"{layer}{LOW}"), parts.get(f"{layer}{HIGH}"))
        if len(whole) != 2 or found != ((rank, whole[1]), (whole[0], rank)):
            return layer
    return None
