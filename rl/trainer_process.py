"""What the loop asks of a trainer, and the client of the trainer process. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from rl import frames
from rl.config import TrainerConfig
from rl.errors import CheckpointFailed, ConfigError, NonFiniteStep, TrainerDead
from rl.precision import Precision
from rl.processes import THREADS
from rl.types import Batch, StepReport

ALLOCATOR = ":".join(
    (
        "glibc.malloc.mmap_threshold=4294967296",
        "glibc.malloc.trim_threshold=17179869184",
        "glibc.malloc.top_pad=268435456",
        "glibc.malloc.hugetlb=1",
    )
)
"""Keeps freed activations in the process, on huge pages: returning them to the kernel after each layer and
paging them in again took a quarter of a step (58 against 76 trained tokens a processor-second)."""

ERRORS = {error.__name__: error for error in (CheckpointFailed, ConfigError, NonFiniteStep)}

EXIT_GRACE_SECONDS = 2.0
"""The process ends by itself when its pipe closes; only one that is stopped or swapping is killed."""

LOG_TAIL_LINES = 5


class Trainer(Protocol):
    """Holds the policy and changes it one step at a time. Only one `step` may be under way.

    Directories are created by the caller. Each method that returns an int returns the step count
    that the written or read state belongs to.
    """

    async def step(self, batch: Batch) -> StepReport:
        """Raises NonFiniteStep (nothing changed), TrainerDead."""
        ...

    async def write_weights(self, path: Path) -> int:
        """Writes the weights as one safetensors file."""
        ...

    async def share_weights(self, path: Path, version: int) -> int:
        """Writes the weights as `version` into the segment `path` (`rl.segment`), an empty file at first."""
        ...

    async def save(self, directory: Path) -> int:
        """Writes weights and optimiser of the last whole step, also while a step is under way.

        Raises CheckpointFailed, OSError.
        """
        ...

    async def restore(self, directory: Path) -> int:
        """Reads what `save` wrote. Raises ConfigError when it is of another model."""
        ...


class TrainerProcess:
    """The real trainer, in a process of its own. Made by `start_trainer`."""

    def __init__(self, process: Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._dead = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the process ended, -9 where it had to be killed; None while it runs."""
        return self._process.returncode

    async def load(self, model_path: Path, config: TrainerConfig, precision: Precision = "float32") -> None:
        """Raises ConfigError when `model_path` holds no model."""
        await self._call("load", model_path, config, precision)

    async def step(self, batch: Batch) -> StepReport:
        report: StepReport = await self._call("step", batch)
        return report

    async def write_weights(self, path: Path) -> int:
        return int(await self._call("write_weights", path))

    async def share_weights(self, path: Path, version: int) -> int:
        return int(await self._call("share_weights", path, version))

    async def save(self, directory: Path) -> int:
        return int(await self._call("save", directory))

    async def restore(self, directory: Path) -> int:
        return int(await self._call("restore", directory))

    async def _call(self, name: str, *arguments: Any) -> Any:
        if self._dead:
            raise self._death()
        self._number += 1
        number = self._number
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._stdin.write(frames.encode((number, name, arguments)))
            with suppress(ConnectionError):  # the reader tells of the death, with the log's last lines
                await self._stdin.drain()
            error, result = await reply
        finally:
            del self._replies[number]
        if error in ERRORS:
            raise ERRORS[error](result)
        if error is not None:
            raise RuntimeError(f"the trainer failed at {name}: {error}: {result}")
        return result

    async def read_replies(self) -> None:
        """Hands replies to their callers until the process ends; then every caller gets TrainerDead."""
        try:
            while True:
                number, error, result = await frames.receive(self._stdout)
                reply = self._replies.get(number)
                if reply is not None and not reply.done():
                    reply.set_result((error, result))
        except asyncio.IncompleteReadError:
            await self._process.wait()
        finally:
            self._dead = True
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(self._death())

    async def stop(self) -> None:
        """Closes the pipe, at which the process ends, in mid-step too; kills it if it has not."""
        self._stdin.close()
        try:
            async with asyncio.timeout(EXIT_GRACE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def _stdin(self) -> StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    def _death(self) -> TrainerDead:
        with self._log_path.open(errors="replace") as log:
            tail = " | ".join(line.strip() for line in deque(log, LOG_TAIL_LINES))
        code = self._process.returncode
        return TrainerDead(f"the trainer process ended with code {code}: {tail or 'no output'}")


@asynccontextmanager
async def start_trainer(log_path: Path, python: str = sys.executable) -> AsyncIterator[TrainerProcess]:
    """A trainer process for the length of the block; what it prints goes to `log_path`.

    It is spawned with nothing inherited but its pipes, because this program speaks gRPC and must not
    fork; it has a group of its own, so that a Ctrl-C at the terminal reaches the loop alone, which then
    saves and ends it.
    """
    settings = {**THREADS, "GLIBC_TUNABLES": ALLOCATOR, "TOKENIZERS_PARALLELISM": "false"}
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            "rl.trainer_host",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | settings,
            start_new_session=True,
        )
    trainer = TrainerProcess(process, log_path)
    reading = asyncio.create_task(trainer.read_replies())
    try:
        yield trainer
    finally:
        try:
            await asyncio.shield(trainer.stop())
        finally:
            await reading
