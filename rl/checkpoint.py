"""Saves a run in one atomic directory and finds the newest one: what is there is always whole.

checkpoints/step-000012/
    model.safetensors  optimizer.safetensors  trainer.json     written by the trainer
    state.json                                                 everything else, and how long those files are

A checkpoint is written beside the others, synced to the disk and renamed. Names that begin with a dot are
what a killed run was writing or removing; they never count and go at the next opportunity.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rl.errors import CheckpointFailed, ConfigError
from rl.trainer_process import Trainer
from rl.types import Task

FORMAT = 2
"""Raised whenever what a checkpoint holds, or what it means, changes."""

PREFIX = "step-"
STATE_FILE = "state.json"
PARTIAL, REMOVED = ".partial", ".removed-"
KEPT = 2
"""The newest, and the one before in case the newest proves unwanted."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """All that the loop needs to go on, beside the trainer's own state.

    `pending` are the tasks that had been given out but were neither trained nor dropped; a resumed run
    plays them first, so each task is trained exactly once. `observed` names those of them that the
    curriculum has already heard about. `before` is the held-out result from before training.

    `dropped` are tasks that were dropped since the newest step, and why. `waiting_seconds` and
    `training_seconds` are the trainer's, `wall_seconds` the whole run's so far, and `ledger` its books.
    `lengths` says how many bytes of each file with a line a step belong to this checkpoint. `score` is the
    held-out solve rate measured at this very step, None when none was.
    """

    step: int
    version: int
    curriculum: dict[str, Any]
    pending: tuple[Task, ...] = ()
    observed: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0
    waiting_seconds: float = 0.0
    training_seconds: float = 0.0
    ledger: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Keeping:
    """`newest` so many checkpoints stay, and the one with the best score. `durable`: when the write returns
    it is on the disk, not in the kernel's memory alone; that takes seconds for each gigabyte."""

    newest: int = KEPT
    durable: bool = True


async def write_checkpoint(
    directory: Path, trainer: Trainer, state_at: Callable[[int], LoopState], keeping: Keeping = Keeping()
) -> Path:
    """Writes a checkpoint and removes old ones. An interrupted write leaves nothing that counts.

    `state_at` is asked for the loop's state once it is known which version the trainer has saved. A step
    that is saved already stays as it is. Raises CheckpointFailed, with all that was there before untouched,
    when the disk is full, read-only or broken; TrainerDead.
    """
    partial = directory / PARTIAL
    try:
        await asyncio.to_thread(_make_empty, partial)
        state = state_at(await trainer.save(partial))
        target = directory / f"{PREFIX}{state.step:06d}"
        await asyncio.to_thread(_complete, partial, target, state, durable=keeping.durable)
        await asyncio.to_thread(_prune, directory, keeping.newest)
    except (OSError, CheckpointFailed) as error:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        raise CheckpointFailed(_failure(directory, error)) from error
    return target


def _failure(directory: Path, error: Exception) -> str:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
    last = newest_checkpoint(directory)
    stays = f"{last.name} stays the last one" if last else "there is none yet"
    try:
        free = f"{shutil.disk_usage(directory).free / 1e6:,.0f} MB are free there"
    except OSError:
        free = "that directory cannot be read"
    return f"no checkpoint could be written to {directory}: {why}; {free}; {stays}"


def _make_empty(directory: Path) -> None:
    remove_leftovers(directory.parent)
    directory.mkdir(parents=True)


def remove_leftovers(directory: Path) -> None:
    """Removes what runs that were killed had begun to write, or to remove."""
    for left in directory.glob(".*"):
        shutil.rmtree(left)


def _complete(partial: Path, target: Path, state: LoopState, *, durable: bool) -> None:
    if target.exists():
        # The same step of the same run: to replace it there would have to be a moment without it.
        shutil.rmtree(partial)
        return
    written = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    content = {"format": FORMAT, "files": written, **asdict(state)}
    (partial / STATE_FILE).write_text(json.dumps(content, indent=1))
    if durable:
        for file in partial.iterdir():
            sync(file)
        sync(partial)
    partial.rename(target)
    if durable:
        sync(target.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(directory: Path, newest: int) -> None:
    found = _checkpoints(directory)
    scores = [(score, step) for step, path in enumerate(found) if (score := _score(path)) is not None]
    best = found[max(scores)[1]] if scores else None
    for checkpoint in found[:-newest]:
        if checkpoint != best:
            # Renamed first: one that is half removed must not look like a checkpoint.
            shutil.rmtree(checkpoint.rename(directory / f"{REMOVED}{checkpoint.name}"))


def _score(checkpoint: Path) -> float | None:
    try:
        score = json.loads((checkpoint / STATE_FILE).read_text()).get("score")
    except (OSError, ValueError):
        return None
    return None if score is None else float(score)


def _checkpoints(directory: Path) -> list[Path]:
    """All of them, by step."""
    found = {path: path.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*")}
    return sorted((path for path, number in found.items() if number.isdigit()), key=lambda p: int(found[p]))


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint of the highest step; None when there is none."""
    return max(_checkpoints(directory), key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)


def read_state(checkpoint: Path) -> LoopState:
    """The loop's part of a checkpoint. Raises ConfigError when it cannot be read, is of another format, or
    when a file beside it is not as long as it was."""
    way_out = "remove it to go on from the one before"
    try:
        values = json.loads((checkpoint / STATE_FILE).read_text())
        found = values.pop("format", 1)
        if found != FORMAT:
            raise ConfigError(
                f"checkpoint {checkpoint} has format {found}, and this version reads {FORMAT}: go on with "
                "the version that wrote it, or begin anew without --resume"
            )
        for name, length in values.pop("files").items():
            if (size := (checkpoint / name).stat().st_size) != length:
                raise ConfigError(
                    f"checkpoint {checkpoint} is damaged: {name} has {size} of its {length} bytes; {way_out}"
                )
        values["pending"] = tuple(Task(**task) for task in values["pending"])
        values["observed"] = tuple(values["observed"])
        missing = {each.name for each in fields(LoopState)} - set(values)
        if missing:
            raise KeyError(*sorted(missing))
        return LoopState(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"checkpoint {checkpoint} cannot be read: {error!r}; {way_out}") from error
