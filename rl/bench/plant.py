"""The simulated trainer, and a whole loop around it: all else between generator and trainer is real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rl.bench.arms import (
    FULL_BATCH_SECONDS,
    GROUPS,
    MEAN_TOKENS,
    SAMPLES,
    SANDBOXES,
    TAILS,
    UPDATE_SECONDS,
    Cell,
)
from rl.bench.engine import SimulatedEngine, Speed
from rl.bench.episodes import Episodes, MarkedBytes, Simulated
from rl.buffer import GroupBuffer
from rl.curriculum import SolveRateBands
from rl.dialogue import Dialogue
from rl.fakes import FakeTrainer
from rl.ledger import Ledger, MeteredGenerator
from rl.loop import Loop
from rl.metrics import Row
from rl.plan import Parts, Plan
from rl.player import Player
from rl.policies import build_policy
from rl.referee import Referee
from rl.rollout import Limits, Rollout
from rl.side_loop import SameLoop
from rl.tasks import TaskSource
from rl.types import Batch, StepReport
from rl.weights import Publisher
from sandboxd.scratch import scratch_directory
from sandboxd.simulation import SimulatedPool, simulated_pool

UNLIMITED = Limits(
    max_turns=2, turn_tokens=1 << 20, context_tokens=1 << 21, turn_seconds=1e6, verify_seconds=1e6
)


@dataclass(frozen=True, slots=True)
class Episode:
    """What an episode is like: its mean length in tokens, and its time limit in seconds; by default none is
    cut by its time, for the tail is what is to be seen. One in `hang_every` never ends; none when 0."""

    mean_tokens: int = MEAN_TOKENS
    seconds: float = 1e5
    hang_every: int = 0


DEFAULT = Episode()
SCRATCH_PREFIX = "rl-bench-"


class SimulatedTrainer(FakeTrainer):
    """Takes time in proportion to the tokens that it trains on, `seconds_per_token`; keeps no batch."""

    def __init__(self, seconds_per_token: float) -> None:
        super().__init__()
        self.trained_tokens = 0
        self._seconds_per_token = seconds_per_token

    async def step(self, batch: Batch) -> StepReport:
        self.trained_tokens += batch.trained_count
        await asyncio.sleep(batch.trained_count * self._seconds_per_token)
        report = await super().step(batch)
        self.batches.clear()
        return report


@dataclass(frozen=True, slots=True)
class Plant:
    """A loop that is ready to run, and what there is to be read from it afterwards."""

    loop: Loop
    rows: list[Row]
    engine: SimulatedEngine
    episodes: Episodes
    trainer: SimulatedTrainer
    ledger: Ledger
    pool: SimulatedPool


@asynccontextmanager
async def plant(
    cell: Cell, episode: Episode = DEFAULT, observe: Callable[[Row], None] | None = None
) -> AsyncIterator[Plant]:
    """Builds the cell's loop in the running event loop, which must be a `VirtualLoop`.

    `observe` is given the row of each step.
    """
    # The pool's retries draw their pauses from the module's own random state.
    random.seed(cell.seed)
    spread = TAILS[cell.world.tail]
    batch_tokens = GROUPS * SAMPLES * episode.mean_tokens
    capacity = batch_tokens / FULL_BATCH_SECONDS
    episodes = Episodes(episode.mean_tokens, spread, cell.seed, hang_every=episode.hang_every)
    engine = SimulatedEngine(Speed(capacity, capacity / cell.streams, UPDATE_SECONDS), episodes)
    trainer = SimulatedTrainer(cell.world.train_seconds / batch_tokens)
    ledger, source, rows = Ledger(), TaskSource([Simulated(spread)]), list[Row]()

    async def on_step(row: Row) -> None:
        rows.append(row)
        if observe is not None:
            observe(row)

    with scratch_directory(SCRATCH_PREFIX) as directory:
        model, weights = directory / "model", directory / "weights"
        for path in (model, weights):
            path.mkdir()
        async with simulated_pool(SANDBOXES[cell.world.sandboxes]) as pool:
            rollout = Rollout(
                MeteredGenerator(engine, ledger),
                pool,
                Dialogue(MarkedBytes()),
                Referee(source, UNLIMITED.verify_seconds, SameLoop()),
                limits=UNLIMITED,
                clock=asyncio.get_running_loop().time,
            )
            parts = Parts(
                curriculum=SolveRateBands(source, list(source.families), seed=cell.seed),
                player=Player(rollout, ledger, concurrent=cell.streams, episode_seconds=episode.seconds),
                buffer=GroupBuffer(build_policy(cell.arm.rules, cell.arm.bound, GROUPS)),
                trainer=trainer,
                publisher=Publisher(trainer, engine, model, weights),
                on_step=on_step,
                clock=asyncio.get_running_loop().time,
            )
            loop = Loop(parts, _plan(cell))
            yield Plant(loop, rows, engine, episodes, trainer, ledger, pool)


def _plan(cell: Cell) -> Plan:
    return Plan(
        steps=cell.steps,
        groups_per_batch=GROUPS,
        samples_per_group=SAMPLES,
        spare_samples=cell.arm.spare_samples,
        min_samples=cell.arm.rules.min_samples,
    )
