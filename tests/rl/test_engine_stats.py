"""What the engine says of itself reaches the generator's numbers through vLLM's own stat loggers."""

from __future__ import annotations

from typing import Any

import pytest

from rl.generators.engine_stats import EngineStats


@pytest.mark.filterwarnings("default")  # importing vLLM warns of what it uses itself
def test_vllm_takes_it_for_a_stat_logger() -> None:
    from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    stats, no_config = EngineStats(), Any
    adapter = PerEngineStatLoggerAdapter(no_config, [0], stats)
    iteration = IterationStats()
    iteration.num_preempted_reqs = 2
    adapter.record(SchedulerStats(kv_cache_usage=0.75, num_waiting_reqs=3), iteration, engine_idx=0)
    adapter.record(None, iteration, engine_idx=0)
    adapter.record(SchedulerStats(kv_cache_usage=0.5), None, engine_idx=0)
    adapter.log()
    adapter.log_engine_initialized()
    adapter.record_sleep_state(1, 0)
    assert (stats.kv_cache_usage, stats.queued, stats.preemptions) == (0.5, 0, 4)
