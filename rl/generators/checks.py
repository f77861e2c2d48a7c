"""Looks at weights before they go into an engine, which does not survive a load that breaks off half-way."""

from __future__ import annotations

from pathlib import Path

from rl.generator import UpdateFailed

TIED = frozenset({"lm_head.weight"})
"""Where it is tied to the embedding, some programs write it and others do not."""


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the safetensors files of a directory; reads their heads alone.

    Raises UpdateFailed for a file that is not whole, and for a directory without any.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:
                names = tensors.keys()
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise UpdateFailed(f"{file} did not load: {error}") from error
    if not shapes:
        raise UpdateFailed(f"weights from {directory} did not load: there is no safetensors file in it")
    return shapes


def check_weights(directory: Path, model: Path) -> None:
    """Raises UpdateFailed unless `directory` holds the same tensors, by name and shape, as `model`."""
    new, old = tensor_shapes(directory), tensor_shapes(model)
    wrong = sorted((new.keys() ^ old.keys()) - TIED)
    wrong += sorted(name for name in new.keys() & old.keys() if new[name] != old[name])
    if wrong:
        raise UpdateFailed(f"weights from {directory} did not load: {wrong[0]} is not as in {model}")
