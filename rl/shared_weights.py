"""The trainer's side of a segment: one copy from the parameters into shared memory, converted on the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rl.segment import Place, Segment, Slot, create_segment, places_of


class SharedWeights:
    """Writes versions of the same tensors into the segment `path`, which exists, as numbers of `dtype`."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.path = path
        self._dtype = dtype
        named = str(dtype).removeprefix("torch.")
        places = places_of([(name, named, tuple(tensor.shape)) for name, tensor in tensors.items()])
        self._segment = create_segment(path, places)

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors' present values in as `version`."""
        with self._segment.writing(version) as slot, torch.no_grad():
            for name, tensor in tensors.items():
                view_of(self._segment, slot, self._segment.places[name]).copy_(tensor)


def view_of(segment: Segment, slot: Slot, place: Place) -> Tensor:
    """The tensor itself, in shared memory: nothing is copied."""
    flat = torch.frombuffer(
        segment.map, dtype=getattr(torch, place.dtype), count=place.count, offset=slot.start + place.offset
    )
    return flat.view(place.shape)
