"""Saves a run in one atomic directory and finds the newest one: what is there is always whole.

checkpoints/step-000012/
    model.safetensors  optimizer.safetensors  trainer.json     written by the trainer
    state.json                                                 everything else
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl.errors import ConfigError
from rl.trainer_process import Trainer
from rl.types import Task

PREFIX = "step-"
STATE_FILE = "state.json"
KEPT = 2
"""The newest, and the one before in case the newest proves unwanted."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """All that the loop needs to go on, beside the trainer's own state.

    `pending` are the tasks that had been given out but were neither trained nor dropped; a resumed run
    plays them first, so each task is trained exactly once. `observed` names those of them that the
    curriculum has already heard about. `before` is the held-out result from before training.
    """

    step: int
    version: int
    curriculum: dict[str, Any]
    pending: tuple[Task, ...] = ()
    observed: tuple[str, ...] = ()
    before: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0


async def write_checkpoint(directory: Path, trainer: Trainer, state_at: Callable[[int], LoopState]) -> Path:
    """Writes a checkpoint and removes old ones. An interrupted write leaves nothing that counts.

    `state_at` is asked for the loop's state once it is known which version the trainer has saved.
    """
    partial = directory / ".partial"
    await asyncio.to_thread(_make_empty, partial)
    state = state_at(await trainer.save(partial))
    target = directory / f"{PREFIX}{state.step:06d}"
    await asyncio.to_thread(_complete, partial, target, state)
    return target


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _complete(partial: Path, target: Path, state: LoopState) -> None:
    (partial / STATE_FILE).write_text(json.dumps(asdict(state), indent=1))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in sorted(target.parent.glob(f"{PREFIX}*"))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint of the highest step; None when there is none."""
    return max(directory.glob(f"{PREFIX}*"), default=None)


def read_state(checkpoint: Path) -> LoopState:
    """The loop's part of a checkpoint. Raises ConfigError when it cannot be read."""
    try:
        values = json.loads((checkpoint / STATE_FILE).read_text())
        values["pending"] = tuple(Task(**task) for task in values["pending"])
        values["observed"] = tuple(values["observed"])
        return LoopState(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"checkpoint {checkpoint} cannot be read: {error}") from error
