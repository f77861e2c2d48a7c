"""Keeps the weights of a run after so many steps, each as a model directory: RUN/weights/step-000005.

They are measured when the run is over, so that measuring takes no time from it and gives it none: while one
measures in between, rollouts go on and the next batches are ready when training resumes.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from rl.trainer_process import Trainer
from rl.weights import WEIGHTS_FILE, link_model_files

DIRECTORY, PREFIX, PARTIAL = "weights", "step-", ".partial"


class WeightsKeeper:
    """Writes a directory every so many steps."""

    def __init__(self, run: Path, trainer: Trainer, model_path: Path, every_steps: int) -> None:
        self._directory = run / DIRECTORY
        self._trainer = trainer
        self._model_path = model_path
        self._every = every_steps

    async def after_step(self, step: int) -> None:
        """Keeps the weights of this step when it is its turn; what is there appears whole. Raises OSError."""
        if step % self._every:
            return
        partial = self._directory / PARTIAL
        target = step_directory(self._directory.parent, step)
        await asyncio.to_thread(link_model_files, self._model_path, partial)
        await self._trainer.write_weights(partial / WEIGHTS_FILE)
        # A resumed run comes by steps again that it had kept, and may have trained them otherwise.
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
        await asyncio.to_thread(partial.rename, target)


def step_directory(run: Path, step: int) -> Path:
    """Where the weights of a step lie."""
    return run / DIRECTORY / f"{PREFIX}{step:06d}"


def kept_weights(run: Path) -> dict[int, Path]:
    """Step → model directory, by step."""
    found = {int(path.name.removeprefix(PREFIX)): path for path in (run / DIRECTORY).glob(f"{PREFIX}[0-9]*")}
    return dict(sorted(found.items()))
