"""The sender process: rank 0 of the group over which servers get their weights, read out of the segment.

    python -m rl.sender_host KIND       (started by rl.sender_process, never by hand)

A process of its own because a broadcast whose other members are gone may never return: whoever waits for it
ends this process, and the trainer has lost nothing. The main thread answers requests on standard input; when
the pipe closes, the parent is gone, however it died, and the process ends on the spot.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rl import frames
from rl.communicators import Communicator, Kind, connect, device_of
from rl.segment import Place, Segment, Slot, open_segment

Request = tuple[str, tuple[Any, ...]]


class Host:
    """Answers requests `(name, arguments)` with what failed, or None."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._communicator: Communicator | None = None

    def answer(self, request: Request) -> str | None:
        name, arguments = request
        handlers: dict[str, Callable[..., None]] = {
            "check": self.check,
            "open": self.open,
            "send": self.send,
            "close": self.close,
        }
        try:
            handlers[name](*arguments)
        except Exception as failure:  # noqa: BLE001 - it crosses the pipe and is raised on the other side
            return f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
        return None

    def check(self) -> None:
        """Raises RuntimeError when this host cannot send in this way."""
        device_of(self._kind)

    def open(self, address: str, port: int, size: int) -> None:
        """Makes a group and waits until all have joined."""
        self.close()
        device_of(self._kind)
        self._communicator = connect(self._kind, address, port, size)

    def send(self, path: Path, version: int, buffer_bytes: int) -> None:
        """Broadcasts a version as vLLM's servers take packed weights in. Raises NotInSegment."""
        if self._communicator is None:
            raise RuntimeError("there is no group: open comes first")
        device = device_of(self._kind)
        segment = open_segment(path)
        slot = segment.find(version)
        for piece in pieces(segment, slot, buffer_bytes):
            self._communicator.broadcast(piece.to(device), src=0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        segment.check(slot)

    def close(self) -> None:
        """Leaves the group."""
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None


def pieces(segment: Segment, slot: Slot, buffer_bytes: int) -> Iterator[torch.Tensor]:
    """A slot's values as bytes, cut where vLLM's receivers expect it: after the tensor with which a piece
    has grown beyond `buffer_bytes`. Tensors lie one behind the other, so nothing is copied."""
    places: list[Place] = list(segment.places.values())
    start = 0
    for place in places:
        if place.end - start > buffer_bytes or place is places[-1]:
            with warnings.catch_warnings():
                # That the memory is not writable: nobody writes to what is sent.
                warnings.simplefilter("ignore", UserWarning)
                yield torch.frombuffer(
                    segment.map, dtype=torch.uint8, count=place.end - start, offset=slot.start + start
                )
            start = place.end


def read_forever(requests: BinaryIO, waiting: queue.SimpleQueue[Request]) -> None:
    """The reader thread."""
    while True:
        try:
            waiting.put(frames.read(requests))
        except EOFError:
            os._exit(0)  # the main thread may be inside a broadcast that never ends


def main(kind: Kind) -> None:
    # Libraries print; the pipe is ours alone. What they print goes where standard error goes: the log.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=read_forever, args=(sys.stdin.buffer, waiting), daemon=True).start()
    host = Host(kind)
    while True:
        reply = host.answer(waiting.get())
        replies.write(frames.encode(reply))
        replies.flush()


if __name__ == "__main__":
    main("nccl" if sys.argv[1] == "nccl" else "gloo")
