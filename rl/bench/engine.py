"""A simulated inference engine: requests share its throughput, and weight updates split them into versions.

Every running request is served at the same rate, at most `stream_rate` and together at most `capacity`:
continuous batching as measured (10, 92, 170, 199 tokens/s at 1, 8, 32, 64 requests of vLLM on two cores),
without the rounding of its knee. Reading prompts costs nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl.bench.episodes import Episodes
from rl.generator import Generation, GeneratorStats, Sampling
from rl.types import TokenIds, VersionSpan

LOGPROB = -0.5


@dataclass(frozen=True, slots=True)
class Speed:
    """In tokens a second: of all requests together, and of one alone. `update_seconds` is the pause in which
    new weights are loaded."""

    capacity: float
    stream_rate: float
    update_seconds: float = 0.0

    def of_each(self, running: int) -> float:
        """Tokens a second of each of so many requests."""
        return min(self.stream_rate, self.capacity / max(running, 1))


@dataclass(slots=True, eq=False)
class _Request:
    """`began` and `marks` are on the engine's measure of service: tokens that one request was given."""

    began: float
    done: asyncio.Future[None]
    marks: list[tuple[int, float]] = field(default_factory=list)


class SimulatedEngine:
    """Implements `rl.generator.Generator` in the time of the running event loop."""

    def __init__(self, speed: Speed, episodes: Episodes) -> None:
        self.served_tokens = 0.0
        """All that were computed, also for requests that were cancelled."""
        self.speed = speed
        self._episodes = episodes
        self._loop = asyncio.get_running_loop()
        self._version = 0
        self._service = 0.0
        self._at = self._loop.time()
        self._running: dict[_Request, None] = {}
        self._ends: list[tuple[float, int, _Request]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._finished = self._updates = self._prompt_tokens = self._tokens = 0
        self._busy_seconds = self._paused_seconds = 0.0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        """As long as the episode that `context_ids` belongs to was drawn to be."""
        ids, finish_reason = self._episodes.turn(context_ids, sampling.max_tokens)
        self._prompt_tokens += len(context_ids)
        if self._episodes.hangs():
            await asyncio.Event().wait()
        request = _Request(0.0, self._loop.create_future())
        self._advance()
        request.began = self._service
        self._running[request] = None
        heapq.heappush(self._ends, (self._service + len(ids), next(self._numbers), request))
        self._arm()
        try:
            await request.done
        finally:
            self._advance()
            del self._running[request]
            self._arm()
        self._finished += 1
        self._tokens += len(ids)
        logprobs = np.full(len(ids), LOGPROB, np.float32)
        return Generation(ids, logprobs, self._spans(request, len(ids)), finish_reason)

    async def update_weights(self, path: Path, version: int) -> None:
        """Pauses all requests for as long as an update takes; they go on with the new weights."""
        self._advance()
        self._paused = True
        self._arm()
        await asyncio.sleep(self.speed.update_seconds)
        self._advance()
        self._paused = False
        for request in self._running:
            request.marks.append((self._version, self._service))
        self._version = version
        self._updates += 1
        self._arm()

    def stats(self) -> GeneratorStats:
        self._advance()
        return GeneratorStats(
            running=len(self._running),
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._tokens,
            busy_seconds=self._busy_seconds,
            paused_seconds=self._paused_seconds,
            updates=self._updates,
        )

    def _advance(self) -> None:
        """Serves everybody up to now."""
        now = self._loop.time()
        passed, self._at = now - self._at, now
        if self._paused:
            self._paused_seconds += passed
        elif self._running:
            each = passed * self.speed.of_each(len(self._running))
            self._service += each
            self.served_tokens += each * len(self._running)
            self._busy_seconds += passed

    def _arm(self) -> None:
        """Sets the timer for the next request that will be complete."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if self._ends and not self._paused:
            left = max(self._ends[0][0] - self._service, 0.0)
            self._timer = self._loop.call_at(
                self._at + left / self.speed.of_each(len(self._running)), self._complete
            )

    def _complete(self) -> None:
        """Ends the request at the head, whose last token is there but for rounding."""
        self._advance()
        end, _, request = heapq.heappop(self._ends)
        self._service = max(self._service, end)
        if not request.done.done():
            request.done.set_result(None)
        self._timer = None

    def _spans(self, request: _Request, count: int) -> tuple[VersionSpan, ...]:
        """Which weights drew which tokens; an update outside of them splits nothing."""
        spans, start = [], 0
        for version, mark in request.marks:
            end = min(round(mark - request.began), count)
            if end > start:
                spans.append(VersionSpan(version, start, end))
                start = end
        if start < count:
            spans.append(VersionSpan(self._version, start, count))
        return tuple(spans)
