"""Makes the trainer's weights live in the generator: written to shared memory, loaded, then counted."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import tenacity

from rl.generator import Generator, UpdateFailed
from rl.trainer_process import Trainer

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it
PREFIX = "sandboxd-rl-"
WEIGHTS_FILE = "model.safetensors"
SEGMENT_FILE = "segment"

UPDATE_ATTEMPTS = 3
"""A load that failed leaves the old weights running, so trying again costs a pause and nothing else."""


@asynccontextmanager
async def weights_directory(parent: Path | None = None) -> AsyncIterator[Path]:
    """A directory in memory for the length of the block, on disk where there is no `/dev/shm`.

    Its name carries this process's number: what killed runs left behind is removed first.
    """
    directory = await asyncio.to_thread(_make_directory, parent)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make_directory(parent: Path | None) -> Path:
    parent = parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
    _remove_orphans(parent)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))


def _remove_orphans(parent: Path) -> None:
    for directory in parent.glob(f"{PREFIX}*"):
        owner = directory.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not _process_exists(int(owner)):
            shutil.rmtree(directory, ignore_errors=True)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def open_segment_file(directory: Path) -> Iterator[Path]:
    """An empty file for a segment (`rl.segment`), for the length of the block or of this process's life.

    On Linux it has no name: the path leads through this process to an open file in memory, which the kernel
    frees with the last process that maps it, however they all end, and which no `/dev/shm` is too small for.
    Elsewhere it lies in `directory`.
    """
    if not hasattr(os, "memfd_create"):
        path = directory / SEGMENT_FILE
        path.touch()
        yield path
        return
    descriptor = os.memfd_create("sandboxd-weights", os.MFD_CLOEXEC)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


class Publisher:
    """Publishes one version after another; `version` is the newest that the generator serves.

    With a `segment` the weights go through shared memory, without one through files in `directory`.
    """

    def __init__(
        self,
        trainer: Trainer,
        generator: Generator,
        model_path: Path,
        directory: Path,
        segment: Path | None = None,
    ) -> None:
        self._trainer = trainer
        self._generator = generator
        self._model_path = model_path
        self._directory = directory
        self._segment = segment

    @property
    def version(self) -> int:
        return self._generator.version

    async def publish(self, version: int) -> None:
        """Writes the trainer's weights and has the generator serve them as `version`.

        A version appears whole or not at all. The directory of the one before goes once the new one is live;
        a segment keeps both. Raises UpdateFailed (the generator serves what it served before), GeneratorDead.
        """
        if self._segment is not None:
            await self._trainer.share_weights(self._segment, version)
            await self._update(self._segment, version)
            return
        written = await self._write(version)
        try:
            await self._update(written, version)
        except UpdateFailed:
            await asyncio.to_thread(shutil.rmtree, written, ignore_errors=True)
            raise
        await asyncio.to_thread(self._remove_all_but, written)

    async def _update(self, path: Path, version: int) -> None:
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(UPDATE_ATTEMPTS),
            retry=tenacity.retry_if_exception_type(UpdateFailed),
            reraise=True,
        ):
            with attempt:
                await self._generator.update_weights(path, version)

    async def _write(self, version: int) -> Path:
        """The files that a loader wants beside the weights are links to the base model's."""
        target = self._directory / f"version-{version}"
        partial = target.with_suffix(".partial")
        await asyncio.to_thread(link_model_files, self._model_path, partial)
        await self._trainer.write_weights(partial / WEIGHTS_FILE)
        await asyncio.to_thread(partial.rename, target)
        return target

    def _remove_all_but(self, kept: Path) -> None:
        for directory in self._directory.iterdir():
            if directory != kept:
                shutil.rmtree(directory, ignore_errors=True)


def link_model_files(model_path: Path, target: Path) -> None:
    """Makes `target` anew, with links to all files of a model directory but its weights."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in model_path.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            (target / file.name).symlink_to(file.resolve())
