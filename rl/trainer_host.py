"""The trainer process: answers requests on standard input with replies on standard output.

    python -m rl.trainer_host        (started by rl.trainer_process, never by hand)

Two threads. The reader takes requests off the pipe: `save` it answers itself, at once, even while a step
is being computed, because the weights change only at a step's end; the rest it queues for the main
thread. When the pipe closes, the parent is gone, however it died, and the process ends on the spot.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rl import frames
from rl.config import TrainerConfig
from rl.precision import Precision
from rl.trainer import TorchTrainer

Request = tuple[int, str, tuple[Any, ...]]

NICENESS = 10
"""On the generator's own cores the trainer takes what the generator leaves. Two teams of threads that
preempt one another wait at every barrier for the member that was put aside; one after the other is faster."""


class Host:
    """Answers requests `(number, name, arguments)` with `(number, error name or None, result)`."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._reply_lock = threading.Lock()
        self._queue: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._trainer: TorchTrainer | None = None

    def read_forever(self) -> None:
        """The reader thread."""
        while True:
            try:
                request: Request = frames.read(self._requests)
            except EOFError:
                # Not sys.exit: the main thread may be inside a step and must not finish it first.
                os._exit(0)
            if request[1] == "save":
                self.answer(request)
            else:
                self._queue.put(request)

    def serve_forever(self) -> None:
        """The main thread."""
        while True:
            self.answer(self._queue.get())

    def answer(self, request: Request) -> None:
        number, name, arguments = request
        try:
            result, error = self._handlers[name](*arguments), None
        except Exception as failure:  # noqa: BLE001 - it crosses the pipe and is raised on the other side
            result, error = str(failure) or repr(failure), type(failure).__name__
        with self._reply_lock:
            self._replies.write(frames.encode((number, error, result)))
            self._replies.flush()

    @property
    def _handlers(self) -> dict[str, Callable[..., Any]]:
        if self._trainer is None:
            return {"load": self._load}
        return {
            "step": self._trainer.step,
            "write_weights": self._trainer.write_weights,
            "share_weights": self._trainer.share_weights,
            "save": self._trainer.save,
            "restore": self._trainer.restore,
        }

    def _load(self, model_path: Path, config: TrainerConfig, precision: Precision) -> None:
        self._trainer = TorchTrainer.load(model_path, config, precision)
        self._trainer.warm_up()


def main() -> None:
    os.nice(NICENESS)
    # Libraries print; the pipe is ours alone. What they print goes where standard error goes: the log.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    host = Host(sys.stdin.buffer, replies)
    threading.Thread(target=host.read_forever, daemon=True).start()
    host.serve_forever()


if __name__ == "__main__":
    main()
