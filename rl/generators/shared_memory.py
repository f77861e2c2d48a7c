"""vLLM's weight-transfer engine `shared_memory`: takes the trainer's weights out of a segment (`rl.segment`).

It runs in vLLM's workers and is driven by vLLM's own calls: `init_weight_transfer_engine` with the segment's
`path`, then for every update `start_weight_update`, `update_weights` with the `version`, and
`finish_weight_update`. What fails before the first value is written leaves the old weights in place.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from rl.generators.reload import pack_tied_head
from rl.generators.repack import Plan, plan_repack, repack
from rl.segment import Segment, Slot, open_segment
from rl.shared_weights import view_of


@dataclass
class SegmentInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`path` of the segment, on this host."""

    path: str


@dataclass
class VersionInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to take."""

    version: int


class SharedMemoryEngine(WeightTransferEngine[SegmentInfo, VersionInfo]):  # type: ignore[misc]
    """One for each worker. On a CPU a plain model is packed anew straight out of the segment; any other is
    loaded as vLLM loads a checkpoint."""

    init_info_cls = SegmentInfo
    update_info_cls = VersionInfo
    supports_draft_weight_update = False

    _segment: Segment | None = None
    _plan: Plan | None = None

    def init_transfer_engine(self, init_info: SegmentInfo) -> None:
        """Maps the segment. Raises NotInSegment."""
        self._segment = open_segment(Path(init_info.path))
        plain = self.device.type == "cpu" and not current_platform.is_zen_cpu()
        precision = str(self.model_config.dtype).removeprefix("torch.")
        plain &= {place.dtype for place in self._segment.places.values()} == {precision}
        if plain and self.parallel_config.world_size == 1:
            shapes = {name: place.shape for name, place in self._segment.places.items()}
            self._plan = plan_repack(self.model, shapes)

    def start_weight_update(self) -> None:
        """Nothing yet: `receive_weights` looks first whether the version is there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Raises NotInSegment: nothing was changed; or, should it say "overwritten", anything may be."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionInfo) -> None:
        segment = self._segment
        if segment is None:
            raise RuntimeError("no segment: init_weight_transfer_engine must come first")
        slot = segment.find(update_info.version)
        if self._plan is not None:
            repack(self._plan, lambda names: rows_of(segment, slot, names))
        else:
            self._load(segment, slot)
        segment.check(slot)

    def _load(self, segment: Segment, slot: Slot) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        model: Any = self.model
        model.load_weights((name, rows_of(segment, slot, (name,))) for name in segment.places)
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """The map goes with the process."""
        self._segment = None


def rows_of(segment: Segment, slot: Slot, names: tuple[str, ...]) -> Tensor:
    """The tensors of these names, one's rows behind the other's; uncopied where they lie like that."""
    places = [segment.places[name] for name in names]
    with warnings.catch_warnings():
        # That the memory is not writable: whoever wrote to it should indeed fall over.
        warnings.simplefilter("ignore", UserWarning)
        if any(place.offset != before.end for before, place in pairwise(places)):
            return torch.cat([view_of(segment, slot, place) for place in places])
        rows = sum(place.shape[0] for place in places)
        return view_of(segment, slot, replace(places[0], shape=(rows, *places[0].shape[1:])))
