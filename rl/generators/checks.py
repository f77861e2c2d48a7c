"""Looks at weights before they go into an engine, which does not survive a load that breaks off half-way."""

from __future__ import annotations

from pathlib import Path

from rl.adapter_files import is_adapter, misfit
from rl.generator import UpdateFailed
from rl.segment import NotInSegment, open_segment

TIED = frozenset({"lm_head.weight"})
"""Where it is tied to the embedding, some programs write it and others do not."""

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(directory: Path) -> Shapes:
    """Name → shape of every tensor in the safetensors files of a directory; reads their heads alone.

    Raises UpdateFailed for a file that is not whole, and for a directory without any.
    """
    from safetensors import SafetensorError, safe_open

    shapes: Shapes = {}
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


def segment_shapes(path: Path, version: int) -> Shapes:
    """Name → shape of every tensor in a segment. Raises UpdateFailed unless it holds `version`, whole."""
    try:
        segment = open_segment(path)
        try:
            segment.find(version)
        finally:
            segment.close()
    except NotInSegment as error:
        raise UpdateFailed(f"weights {version} did not load: {error}") from error
    return {name: place.shape for name, place in segment.places.items()}


def segment_identity(path: Path) -> tuple[int, int] | None:
    """What tells a segment from others, also from an earlier one of the same path; None for a directory."""
    if path.is_dir():
        return None
    status = path.stat()
    return status.st_dev, status.st_ino


def check_weights(path: Path, model: Path, version: int = 0) -> None:
    """Raises UpdateFailed unless `path`, a directory or a segment that holds `version`, holds the same
    tensors, by name and shape, as the directory `model`, or an adapter that fits them."""
    new = tensor_shapes(path) if path.is_dir() else segment_shapes(path, version)
    old = tensor_shapes(model)
    if path.is_dir() and is_adapter(path):
        layer = misfit(path, new, old)
        if layer is not None:
            raise UpdateFailed(f"the adapter {path} did not load: {layer} does not fit {model}")
        return
    wrong = sorted((new.keys() ^ old.keys()) - TIED)
    wrong += sorted(name for name in new.keys() & old.keys() if new[name] != old[name])
    if wrong:
        raise UpdateFailed(f"weights from {path} did not load: {wrong[0]} is not as in {model}")
