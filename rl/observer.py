"""Watches a run: adds what the sandboxes and the generator say to each step's row, and writes it down."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rl.generator import Generator
from rl.loop_lag import LoopLag
from rl.metrics import Row, latency_row
from rl.pace import Pacemaker
from rl.progress import Progress
from rl.sandboxes import DaemonSandboxes
from rl.step_log import StepLog
from rl.telemetry import Telemetry
from sandboxd import Client, PoolStats

Totals = dict[str, int]


@dataclass(frozen=True, slots=True)
class Watched:
    """What is asked at each step. `control` is a client of its own, so it outlives the rollouts'."""

    control: Client
    pool: str
    sandboxes: DaemonSandboxes
    generator: Generator
    pace: Pacemaker
    telemetry: Telemetry
    lag: LoopLag = field(default_factory=LoopLag)


class Observer:
    """Writes the metrics log and feeds the progress display."""

    def __init__(
        self,
        watched: Watched,
        log: StepLog,
        progress: Progress,
        *,
        earlier: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`earlier`: seconds of training before the checkpoint that the run was resumed from."""
        self.log = log
        self._earlier = earlier
        self._watched = watched
        self._progress = progress
        self._clock = clock
        self._began = clock()
        self._seen = watched.generator.stats()
        self._busy_began = self._seen.busy_seconds

    async def step(self, row: Row) -> None:
        """Completes the row of a step, writes it and shows it."""
        stats = await self._watched.control.get_pool(self._watched.pool)
        row |= pool_row(stats)
        row |= latency_row("sandbox/acquire", self._watched.sandboxes.drain_waits())
        row |= self._generator_row()
        row["time/wall"] = self._earlier + self._clock() - self._began
        row["perf/generator_idle_ratio"] = self.idle_ratio()
        row["rollout/episode_rate"] = row.get("rollout/episodes", 0.0) / max(row.get("time/step", 0.0), 1e-9)
        row |= self._watched.pace.step_row()
        row |= self._watched.lag.row()
        self._watched.telemetry.record(row)
        self.log.write(row)
        self._progress.step(row, stats)

    def _generator_row(self) -> Row:
        """Since the last step: what the prompts of requests held, how much of it was at hand, and for how
        long new weights stopped the engines."""
        before, self._seen = self._seen, self._watched.generator.stats()
        return {
            "rollout/prompt_tokens": float(self._seen.prompt_tokens - before.prompt_tokens),
            "rollout/cached_tokens": float(self._seen.cached_tokens - before.cached_tokens),
            "time/paused": self._seen.paused_seconds - before.paused_seconds,
        }

    def idle_ratio(self) -> float:
        """Share of the time since the start of training in which the generator had no request to run."""
        elapsed = self._clock() - self._began
        busy = self._watched.generator.stats().busy_seconds - self._busy_began
        return max(0.0, 1.0 - busy / elapsed) if elapsed > 0 else 0.0


def pool_row(stats: PoolStats) -> Row:
    """A pool's counts as they go into a row."""
    row = {
        "sandbox/warm": float(stats.warm),
        "sandbox/starting": float(stats.starting),
        "sandbox/active": float(stats.active),
        "sandbox/waiting": float(stats.waiting),
        "sandbox/start_failures": float(stats.start_failures_total),
        "sandbox/start_rate": stats.starts_per_second,
    }
    if stats.start_seconds is not None:
        row["sandbox/start_s"] = stats.start_seconds
    return row


def sandbox_totals(before: PoolStats, after: PoolStats) -> Totals:
    """What the daemon counted between two moments; `inherited` is what was leased at the first, by a run that
    was killed say, and `active` at the second."""
    return {
        "inherited": before.active,
        "acquired": after.acquired_total - before.acquired_total,
        "released": after.released_total - before.released_total,
        "expired": after.expired_total - before.expired_total,
        "lost": after.lost_total - before.lost_total,
        "active": after.active,
    }
