"""When a run saves: after so many steps, after the best measurement so far, and however training ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rl.checkpoint import Keeping, LoopState, write_checkpoint
from rl.errors import CheckpointFailed, TrainerDead
from rl.kept_weights import WeightsKeeper
from rl.loop import Loop
from rl.metrics import Row
from rl.step_log import StepLogs
from rl.trainer_process import Trainer

SAVE_SECONDS = 6.5
"""The longest that saving may take after Ctrl-C, which must end within 10 s in all."""

SCORES = ("heldout/benchmark", "heldout/overall")
"""By which of the held-out results checkpoints are compared: the first that was measured."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What goes into a run's checkpoints, and where they lie. `finish` completes the loop's state."""

    directory: Path
    trainer: Trainer
    logs: StepLogs
    finish: Callable[[LoopState], LoopState]
    say: Callable[[str], None]


class Saver:
    """Writes a run's checkpoints. One that cannot be written ends nothing: it is told of, and `failure` says
    why the newest is missing."""

    def __init__(
        self,
        saved: Saved,
        *,
        every_steps: int,
        newest: int,
        last: int = -1,
        keeper: WeightsKeeper | None = None,
    ) -> None:
        """`last` is the step that is saved already; `keeper` keeps the weights alone."""
        self.failure: CheckpointFailed | None = None
        self._saved = saved
        self._every = every_steps
        self._newest = newest
        self._last = last
        self._keeper = keeper
        self._score: float | None = None
        self._saving: asyncio.Future[None] | None = None

    async def after_step(self, loop: Loop, row: Row) -> None:
        """Saves when it is time, or when nothing before scored as well as this step did in `row`."""
        self._score = _score(row)
        if self._is_best() or (self._every and loop.step % self._every == 0):
            await self.save(loop)
        self._score = None
        if self._keeper is not None:
            await self._keeper.after_step(loop.step)

    def _is_best(self) -> bool:
        if self._score is None:
            return False
        before = (_score(row) for row in self._saved.logs.metrics.rows[:-1])
        return self._score > max((score for score in before if score is not None), default=-1.0)

    async def train(self, loop: Loop) -> None:
        """Runs the loop and saves what it reached, however it ends; in haste when it is interrupted."""
        try:
            await loop.run()
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(SAVE_SECONDS):
                    if self._saving is not None:
                        await self._saving
                    await self.save(loop, durable=False)
            except TimeoutError:
                self._saved.say(f"not saved within {SAVE_SECONDS:g} s: the checkpoint before is the last")
            raise
        except TrainerDead:
            raise
        except Exception:
            await self.save(loop)
            raise
        await self.save(loop)

    async def save(self, loop: Loop, *, durable: bool = True) -> None:
        """Saves unless this step is saved already or nothing has been trained."""
        if loop.step == self._last or loop.step == 0:
            return
        # Shielded: an interruption while it writes lets it finish rather than begin again.
        self._saving = asyncio.ensure_future(self._write(loop, durable=durable))
        await asyncio.shield(self._saving)

    async def _write(self, loop: Loop, *, durable: bool) -> None:
        saved = self._saved

        def state_at(version: int) -> LoopState:
            state = loop.state(version)
            if saved.logs.tasks.last_step < state.step:
                saved.logs.tasks.write(loop.account_of_step(state.step))
                state = replace(state, dropped={})
            if saved.logs.metrics.last_step < state.step:
                # The run was broken off after this step was trained and before it was measured.
                saved.logs.metrics.write({"step": float(state.step), "version": float(state.version)})
            return saved.finish(replace(state, lengths=saved.logs.sync(), score=self._score))

        try:
            keeping = Keeping(self._newest, durable)
            written = await write_checkpoint(saved.directory, saved.trainer, state_at, keeping)
        except CheckpointFailed as error:
            self.failure = error
            saved.say(str(error))
            return
        self.failure = None
        self._last = int(written.name.rpartition("-")[2])


def _score(row: Row) -> float | None:
    return next((row[name] for name in SCORES if name in row), None)
