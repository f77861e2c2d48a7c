"""How a process group of sender and servers moves bytes: NCCL between GPUs, gloo elsewhere."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

Kind = Literal["nccl", "gloo"]

SECONDS = 300.0
"""A member that waits longer than this for the others gives up; NCCL's own communicators wait as long."""


class Communicator(Protocol):
    """A member's end of the group."""

    def broadcast(self, tensor: Tensor, src: int) -> Any:
        """From member `src` to all others. On a GPU it is only begun when this returns."""
        ...

    def destroy(self) -> None:
        """Leaves the group."""
        ...


class GlooCommunicator:
    """Tensors in the processor's memory. The constructor waits until all members have come.

    Raises RuntimeError, as every call does once another member is gone.
    """

    def __init__(self, address: str, port: int, rank: int, size: int) -> None:
        limit = timedelta(seconds=SECONDS)
        # Without libuv: vLLM's own group does so, too, and it makes no difference in speed here.
        self._store = TCPStore(address, port, size, rank == 0, limit, use_libuv=False)
        self._group: Any = ProcessGroupGloo(PrefixStore("weights", self._store), rank, size, limit)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group = None


def connect(kind: Kind, address: str, port: int, size: int) -> Communicator:
    """Rank 0's end of a group, once all have come; NCCL's as vLLM's trainers make it, on the current GPU."""
    if kind == "gloo":
        return GlooCommunicator(address, port, 0, size)
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    meeting = {"master_address": address, "master_port": port, "world_size": size}
    communicator: Communicator = trainer_init(meeting)
    if getattr(communicator, "disabled", False):
        raise RuntimeError("vLLM found no NCCL library here; VLLM_NCCL_SO_PATH may say where it is")
    return communicator


def device_of(kind: Kind) -> torch.device:
    """Where what is sent must lie. Raises RuntimeError where there is no GPU for NCCL."""
    if kind == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device on this host")
    return torch.device("cuda", torch.cuda.current_device())
