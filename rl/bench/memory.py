"""Whether memory stays flat while long episodes pass through the loop: typed arrays, and a bounded queue."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.bench.arms import ARMS, GROUPS, SAMPLES, Cell, World
from rl.bench.plant import Episode, plant
from rl.bench.virtual import run_virtual
from rl.metrics import Row

LONG_TOKENS = 32_000
TOKEN_BYTES = 8
"""An id and a log-probability."""
MEBIBYTE = 1 << 20
GROWTH_MEBIBYTES = 32.0
"""What the resident memory may grow by from the first third to the end: less than 130 such episodes take."""
ARM = next(arm for arm in ARMS if arm.name == "async-1")


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a run of so many episodes: resident MiB at the end of its first third and at its end, the most MiB
    that finished groups took when a step began, and what all sampled tokens would have taken together."""

    episodes: int
    tokens: int
    resident_third: float
    resident_end: float
    queue_peak: float
    passed_through: float

    @property
    def flat(self) -> bool:
        """Whether the resident memory stayed where it was."""
        return self.resident_end - self.resident_third <= GROWTH_MEBIBYTES

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        return {**asdict(self), "flat": self.flat}


def measure_memory(episodes: int, say: Callable[[str], None], tokens: int = LONG_TOKENS) -> Memory:
    """Trains on about so many episodes of `tokens` tokens each, in virtual time."""
    steps = max(3, episodes // (GROUPS * SAMPLES))
    return run_virtual(_run(Cell(ARM, World(tail="constant"), steps), tokens, say))


async def _run(cell: Cell, tokens: int, say: Callable[[str], None]) -> Memory:
    found: dict[int, float] = {}

    def on_step(row: Row) -> None:
        if row["step"] in (cell.steps // 3, cell.steps):
            gc.collect()
            found[round(row["step"])] = resident()
            say(f"{row['step']:.0f} of {cell.steps} steps: {resident():.0f} MiB resident")

    async with plant(cell, Episode(mean_tokens=tokens), on_step) as built:
        await built.loop.run()
        built.ledger.check()
        return Memory(
            episodes=built.ledger.episodes.generated,
            tokens=tokens,
            resident_third=found[cell.steps // 3],
            resident_end=found[cell.steps],
            queue_peak=max(row["buffer/bytes"] for row in built.rows) / MEBIBYTE,
            passed_through=built.ledger.tokens.generated * TOKEN_BYTES / MEBIBYTE,
        )


def resident() -> float:
    """Resident memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE
