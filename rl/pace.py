"""Keeps the number of episodes that run at once at what sandboxes, engine and trainer can take, and says why.

Consumes: a pool's numbers as they change (WatchPool), what the generator counts, how episodes end. Waits for:
the next of the pool's messages. Produces: the player's limit, and lines for a person.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rl.beside import beside
from rl.buffer import GroupBuffer
from rl.concurrency import Change, ConcurrencyController, Signals
from rl.generator import Generator
from rl.metrics import Row
from rl.player import Playable, Player
from rl.types import Episode, Task, TokenIds, Unscored
from sandboxd import Client, PoolStats
from sandboxd.errors import SandboxdError

INTERVAL_SECONDS, HEARTBEAT_SECONDS = 0.5, 1.0

PEAKS = {
    "inference/kv_cache_usage_perc": "inference/kv_cache_usage_max",
    "inference/requests_waiting": "inference/requests_waiting_max",
    "rollout/inflight": "rollout/inflight_max",
    "sandbox/waiting": "sandbox/waiting_max",
}
"""Of these numbers a step's row has the highest value since the step before, too."""

OWN_CODE = "VERIFIER"
"""The kind of an episode that the task's own code left without a verdict: no fault of the infrastructure."""


class CountedRollout:
    """A rollout that counts how its episodes end."""

    def __init__(self, inner: Playable) -> None:
        self.scored = self.lost = 0
        self._inner = inner

    def prompt(self, task: Task) -> TokenIds:
        return self._inner.prompt(task)

    async def run(self, task: Task) -> Episode:
        episode = await self._inner.run(task)
        if isinstance(episode.outcome, Unscored) and episode.outcome.kind != OWN_CODE:
            self.lost += 1
        elif episode.reward is not None:
            self.scored += 1
        return episode


@dataclass(frozen=True, slots=True)
class Paced:
    """What is looked at. `batch`: groups that one step takes."""

    player: Player
    rollout: CountedRollout
    generator: Generator
    buffer: GroupBuffer
    batch: int


class Pacemaker:
    """Sets the player's limit by a `ConcurrencyController`; off, it only measures. `changes` are all so far;
    `tell` gets what is measured, each time that it looks."""

    def __init__(
        self,
        paced: Paced,
        say: Callable[[str], None],
        *,
        adapt: bool = True,
        tell: Callable[[Row], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.changes: list[Change] = []
        self._paced = paced
        self._say = say
        self._adapt = adapt
        self._tell = tell
        self._began = clock()
        self._controller = ConcurrencyController(paced.player.limit, lambda: clock() - self._began)
        self._pool: PoolStats | None = None
        self._peaks = dict.fromkeys(PEAKS, 0.0)

    @asynccontextmanager
    async def running(self, client: Client, pool: str) -> AsyncIterator[None]:
        """For the length of the block. A pool that can no longer be watched leaves the limit as it is."""
        async with beside(self._watch(client, pool), "pace"):
            yield

    async def _watch(self, client: Client, pool: str) -> None:
        try:
            watched = client.watch_pool(pool, interval=INTERVAL_SECONDS, heartbeat=HEARTBEAT_SECONDS)
            async for stats in watched:
                self.look(stats)
        except SandboxdError as error:
            limit = self._paced.player.limit
            self._say(
                f"episodes at once: {limit} from now on, for the pool cannot be watched: {error.message}"
            )

    def look(self, stats: PoolStats) -> None:
        """Sees the pool's newest numbers and everything else, and acts on them."""
        self._pool = stats
        now = self.row() | self._now()
        self._peaks = {name: max(peak, now[name]) for name, peak in self._peaks.items()}
        if self._tell is not None:
            self._tell(now)
        if not self._adapt:
            return
        change = self._controller.update(self._signals(stats))
        if change is not None:
            self._paced.player.limit = change.after
            self.changes.append(change)
            self._say(str(change))

    def _signals(self, stats: PoolStats) -> Signals:
        paced, engine = self._paced, self._paced.generator.stats()
        return Signals(
            running=paced.player.running,
            scored=paced.rollout.scored,
            lost=paced.rollout.lost,
            ready=paced.buffer.depth,
            batch=paced.batch,
            kv_usage=engine.kv_cache_usage,
            preemptions=engine.preemptions,
            queued=engine.queued,
            waiting=stats.waiting,
            oldest_wait=stats.oldest_wait_seconds or 0.0,
            start=stats.start_seconds or 0.0,
        )

    def _now(self) -> Row:
        """What a step's row holds as it was at another moment."""
        paced = self._paced
        return {
            "rollout/inflight": float(paced.player.running),
            "buffer/depth": float(paced.buffer.depth),
            "sandbox/waiting": float(self._pool.waiting if self._pool else 0),
        }

    def step_row(self) -> Row:
        """Its part of a step's row; when a step ends little may run, so it holds what was highest since the
        last call of what is told in `PEAKS`."""
        row, peaks = self.row(), self._peaks
        now = row | self._now()
        self._peaks = {name: now[name] for name in PEAKS}
        return row | {PEAKS[name]: max(peak, now[name]) for name, peak in peaks.items()}

    def row(self) -> Row:
        """What there is to be seen at this moment."""
        engine, pool = self._paced.generator.stats(), self._pool
        return {
            "concurrency/max_inflight": float(self._paced.player.limit),
            "concurrency/cuts": float(self._controller.cuts),
            "rollout/waiting": float(self._paced.player.waiting),
            "inference/kv_cache_usage_perc": engine.kv_cache_usage,
            "inference/num_preemptions": float(engine.preemptions),
            "inference/requests_waiting": float(engine.queued),
        } | ({"sandbox/oldest_wait_s": pool.oldest_wait_seconds or 0.0} if pool else {})
