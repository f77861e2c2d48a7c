"""Runs one cell in virtual time and says what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl.bench.arms import Cell
from rl.bench.plant import Plant, plant
from rl.bench.virtual import run_virtual
from rl.errors import LedgerError
from rl.metrics import Row, wait_ratio

WARM_UP_SHARE = 0.15
"""Of the steps, which fill the queue and are not counted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one cell gave. Durations are in virtual seconds, ratios and shares in [0, 1] or relative to 1.

    `step_seconds` is the mean of the steps that count; `tokens_per_second` those trained on in them.
    `generator_idle` is the share of the time without any request, `generator_use` computed tokens over those
    that the engine could have computed, `wasted` the computed ones that were not trained on. `length_bias`:
    mean tokens of trained attempts over those of all that were begun, minus 1. `discarded` counts attempts.
    `speedup` is the step time of the synchronous arm in the same world over this one's, `speedup_tokens` the
    same of trained tokens a second; 0 where they were not compared. `runs` differ in the seed alone.
    """

    arm: str
    bound: int
    rate: float
    tail: str
    sandboxes: str
    steps: int
    step_seconds: float
    tokens_per_second: float
    wait_ratio: float
    generator_idle: float
    generator_use: float
    wasted: float
    staleness_mean: float
    staleness_max: float
    length_bias: float
    late_share: float
    ledger_closed: bool
    start_failures: int
    virtual_seconds: float
    processor_seconds: float
    discarded: dict[str, int] = field(default_factory=dict)
    speedup: float = 0.0
    speedup_tokens: float = 0.0
    runs: int = 1

    @property
    def world(self) -> tuple[float, str, str]:
        """What outcomes are compared within."""
        return self.rate, self.tail, self.sandboxes

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        return asdict(self)


def run_cell(cell: Cell) -> Outcome:
    """Plays the cell to its end, in a loop of its own."""
    began = time.process_time()
    return run_virtual(_run(cell, began))


async def _run(cell: Cell, began: float) -> Outcome:
    async with plant(cell) as built:
        start = asyncio.get_running_loop().time()
        await built.loop.run()
        seconds = asyncio.get_running_loop().time() - start
        closed = _closed(built)
        return _outcome(cell, built, closed, (seconds, time.process_time() - began))


def _closed(built: Plant) -> bool:
    """Whether generated = trained + discarded + left over, and acquired = released + expired + lost."""
    try:
        built.ledger.check()
    except LedgerError:
        return False
    built.pool.check()
    stats = built.pool.stats()
    return (
        stats.acquired_total == stats.released_total + stats.expired_total + stats.lost_total + stats.active
    )


def _outcome(cell: Cell, built: Plant, closed: bool, took: tuple[float, float]) -> Outcome:
    virtual, real = took
    counted = built.rows[round(len(built.rows) * WARM_UP_SHARE) :]
    wall = _total(counted, "time/step")
    training = _total(counted, "time/train")
    stats, capacity = built.engine.stats(), built.engine.speed.capacity
    lengths = built.loop.settling.lengths
    mean_drawn = built.episodes.tokens / max(built.episodes.count, 1)
    return Outcome(
        arm=cell.arm.name,
        bound=cell.arm.bound,
        rate=cell.world.rate,
        tail=cell.world.tail,
        sandboxes=cell.world.sandboxes,
        steps=built.loop.step,
        step_seconds=wall / len(counted),
        tokens_per_second=_total(counted, "train/tokens") / wall,
        wait_ratio=wait_ratio(wall - training, training),
        generator_idle=max(0.0, 1.0 - stats.busy_seconds / virtual),
        generator_use=built.engine.served_tokens / (capacity * virtual),
        wasted=1.0 - built.trainer.trained_tokens / max(built.engine.served_tokens, 1.0),
        staleness_mean=_total(counted, "off_policy/mean") / len(counted),
        staleness_max=max(row["off_policy/max"] for row in built.rows),
        length_bias=lengths.trained_mean / mean_drawn - 1.0,
        late_share=lengths.late_share,
        ledger_closed=closed,
        start_failures=built.pool.stats().start_failures_total,
        virtual_seconds=virtual,
        processor_seconds=real,
        discarded=dict(sorted(built.ledger.episodes.reasons.items())),
    )


def _total(rows: Sequence[Row], key: str) -> float:
    return sum(row.get(key, 0.0) for row in rows)
