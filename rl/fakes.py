"""Stand-ins for the costly parts, for tests of the loop and of code built on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from rl.errors import NonFiniteStep
from rl.segment import Segment, create_segment, places_of
from rl.types import Batch, StepReport

FAKE_PLACES = places_of([("weights", "float32", (1,))])


class FakeTrainer:
    """Trains nothing, remembers every batch, and writes small files where the real one writes tensors.

    `before_step` is called with each batch first; it may raise, or await, to stage a failure or a delay.
    """

    def __init__(self, before_step: Callable[[Batch], None] | None = None) -> None:
        self.batches: list[Batch] = []
        self.step_count = 0
        self._before_step = before_step
        self._segment: Segment | None = None

    async def step(self, batch: Batch) -> StepReport:
        if self._before_step is not None:
            self._before_step(batch)
        if any(sample.advantage != sample.advantage for group in batch.groups for sample in group.samples):
            raise NonFiniteStep(f"an advantage of step {batch.step} is NaN")
        self.batches.append(batch)
        self.step_count += 1
        count = batch.trained_count
        return StepReport(batch.step, 0.0, 0.0, count, count, batch.unshared_count, 1.0, 0.0, 0.0, 0.0)

    async def write_weights(self, path: Path) -> int:
        await asyncio.to_thread(path.write_text, str(self.step_count))
        return self.step_count

    async def share_weights(self, path: Path, version: int) -> int:
        if self._segment is None:
            self._segment = create_segment(path, FAKE_PLACES)
        with self._segment.writing(version) as slot:
            self._segment.map[slot.start : slot.start + 4] = version.to_bytes(4, "little")
        return self.step_count

    async def save(self, directory: Path) -> int:
        content = json.dumps({"step": self.step_count})
        await asyncio.to_thread((directory / "trainer.json").write_text, content)
        return self.step_count

    async def restore(self, directory: Path) -> int:
        content = await asyncio.to_thread((directory / "trainer.json").read_text)
        self.step_count = int(json.loads(content)["step"])
        return self.step_count
