"""The newest numbers of vLLM's scheduler, in the shape of one of its stat loggers."""

from __future__ import annotations

from typing import Any


class EngineStats:
    """`kv_cache_usage` is the share of the cache's blocks that requests hold, `queued` the requests that wait
    for a place; since the start, `preemptions` of them lost theirs, and the engine computed `passes`."""

    def __init__(self) -> None:
        self.kv_cache_usage = 0.0
        self.queued = 0
        self.preemptions = 0
        self.passes = 0

    def __call__(self, *_: object) -> EngineStats:
        """vLLM asks for a logger for each engine; this is the one."""
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        """Called after each of the engine's steps; either part may be None."""
        self.passes += 1
        if scheduler_stats is not None:
            self.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
            self.queued = int(scheduler_stats.num_waiting_reqs)
        if iteration_stats is not None:
            self.preemptions += int(iteration_stats.num_preempted_reqs)

    def rested(self) -> None:
        """Nothing runs, so nothing is held and nothing waits: the engine does not say so, for it tells of
        them with a pass alone."""
        self.kv_cache_usage = 0.0
        self.queued = 0

    def log(self) -> None:
        """Write nothing."""

    def log_engine_initialized(self) -> None:
        """Write nothing."""

    def record_sleep_state(self, *_: object) -> None:
        """Take nothing from it."""
