"""vLLM's weight-transfer engine `shared_memory`: takes the trainer's weights out of a segment (`rl.segment`).

It runs in vLLM's workers and is driven by vLLM's own calls: `init_weight_transfer_engine` with the segment's
`path`, then for every update `start_weight_update`, `update_weights` with the `version`, and
`finish_weight_update`. What fails before the first value is written leaves the old weights in place. Whoever
calls `prepare` before he stops the engine finds most of the work done.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from rl.generators.reload import pack_tied_head
from rl.generators.repack import Names, Packed, Plan, Values, pack, plan_repack, put_in
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


class Ahead:
    """What is done of an update to the version in `slot` while the engine still draws with the one before."""

    def __init__(self, segment: Segment, slot: Slot, plan: Plan | None) -> None:
        self.slot = slot
        self._segment = segment
        self._plan = plan
        self.packed: Packed | None = None

    def work(self) -> None:
        """Takes as long as it takes. Raises NotInSegment when the version was overwritten meanwhile."""
        self._segment.populate(self.slot)
        # Both versions of the packed matrices are there until the update. A host without room for that packs
        # once the engine stands still.
        roomy = psutil.virtual_memory().available > 2 * self._segment.slot_bytes
        if self._plan is not None and roomy:
            self.packed = pack(self._plan, values_of(self._segment, self.slot))
        self._segment.check(self.slot)


class SharedMemoryEngine(WeightTransferEngine[SegmentInfo, VersionInfo]):  # type: ignore[misc]
    """One for each worker. On a CPU a plain model is packed anew straight out of the segment; any other is
    loaded as vLLM loads a checkpoint."""

    init_info_cls = SegmentInfo
    update_info_cls = VersionInfo
    supports_draft_weight_update = False

    _segment: Segment | None = None
    _plan: Plan | None = None
    _ahead: tuple[Ahead, Future[None]] | None = None

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

    def prepare(self, version: int) -> Future[None]:
        """Begins, in threads of its own, what of the update to this version changes nothing yet; done when
        that is. Raises NotInSegment, and so may the future."""
        segment = self._mapped()
        slot = segment.find(version)
        if self._ahead is not None and self._ahead[0].slot == slot:
            return self._ahead[1]
        ahead = Ahead(segment, slot, self._plan)
        worker = ThreadPoolExecutor(1)
        done = worker.submit(ahead.work)
        worker.shutdown(wait=False)
        self._ahead = ahead, done
        return done

    def receive_weights(self, update_info: VersionInfo) -> None:
        segment = self._mapped()
        slot = segment.find(update_info.version)
        packed = self._packed_ahead(slot)
        if self._plan is not None:
            values = values_of(segment, slot)
            put_in(self._plan, packed or pack(self._plan, values), values)
        else:
            self._load(segment, slot)
        segment.check(slot)

    def _packed_ahead(self, slot: Slot) -> Packed | None:
        """What was prepared for just this version."""
        if self._ahead is None:
            return None
        (ahead, done), self._ahead = self._ahead, None
        if ahead.slot != slot:
            return None
        done.result()
        return ahead.packed

    def _mapped(self) -> Segment:
        if self._segment is None:
            raise RuntimeError("no segment: init_weight_transfer_engine must come first")
        return self._segment

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


def values_of(segment: Segment, slot: Slot) -> Values:
    """Gives the version's values by their names."""
    return lambda names: rows_of(segment, slot, names)


def rows_of(segment: Segment, slot: Slot, names: Names) -> Tensor:
    """The tensors of these names, one's rows behind the other's; uncopied where they lie like that."""
    places = [segment.places[name] for name in names]
    with warnings.catch_warnings():
        # That the memory is not writable: whoever wrote to it should indeed fall over.
        warnings.simplefilter("ignore", UserWarning)
        if any(place.offset != before.end for before, place in pairwise(places)):
            return torch.cat([view_of(segment, slot, place) for place in places])
        rows = sum(place.shape[0] for place in places)
        return view_of(segment, slot, replace(places[0], shape=(rows, *places[0].shape[1:])))
