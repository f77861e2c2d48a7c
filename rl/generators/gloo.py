"""vLLM's weight-transfer engine `gloo`: as its engine `nccl`, for servers without a GPU.

It is driven by the same calls with the same contents and joins the same kind of group; only what moves the
bytes differs, and where they are taken in. Like `nccl` it works across hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from rl.communicators import GlooCommunicator
from rl.generators.reload import pack_tied_head


class GlooEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """One for each worker."""

    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Joins the sender's group. Raises ValueError for a meeting that only NCCL knows."""
        if init_info.master_address is None or init_info.master_port is None:
            raise ValueError("gloo needs master_address and master_port")
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.model_update_group = GlooCommunicator(
            init_info.master_address, init_info.master_port, rank, init_info.world_size
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the engine `nccl`, without a device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Takes packed weights in, piece by piece. Raises RuntimeError when the sender or another is gone."""
        if self.model_update_group is None:
            raise RuntimeError("no group: init_weight_transfer_engine must come first")
        for names, dtypes, shapes in batches(update_info, self.packed_buffer_size_bytes):
            sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
            self.model_update_group.broadcast(packed, src=0)
            self.model.load_weights(unpack_tensor(packed, names, shapes, dtypes, sizes))

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        pack_tied_head(self.model)


def batches(
    update_info: NCCLWeightTransferUpdateInfo, buffer_bytes: int
) -> Iterator[tuple[list[str], list[torch.dtype], list[list[int]]]]:
    """The tensors of each piece: it ends with the one with which it has grown beyond `buffer_bytes`."""
    names: list[str] = []
    dtypes: list[torch.dtype] = []
    shapes: list[list[int]] = []
    size = 0
    for name, dtype_name, shape in zip(
        update_info.names, update_info.dtype_names, update_info.shapes, strict=True
    ):
        dtype = getattr(torch, dtype_name)
        names.append(name)
        dtypes.append(dtype)
        shapes.append(shape)
        size += math.prod(shape) * dtype.itemsize
        if size > buffer_bytes:
            yield names, dtypes, shapes
            names, dtypes, shapes, size = [], [], [], 0
    if names:
        yield names, dtypes, shapes
