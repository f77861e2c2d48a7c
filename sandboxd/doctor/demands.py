"""What a daemon's settings ask of its host."""

from __future__ import annotations

from sandboxd.config import Config
from sandboxd.doctor.facts import Demand


def demands(config: Config) -> list[Demand]:
    """One for each pool."""
    return [
        Demand(
            pool=name,
            backend=pool.backend,
            count=pool.size_limit,
            pids=pool.limits.pids,
            memory_bytes=pool.limits.memory_bytes,
            image=pool.image,
            runtime=pool.runtime,
        )
        for name, pool in config.pools.items()
    ]
