"""What one measurement yields, whatever its shape: samples, failures, remains, and the same of a baseline."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sandboxd.bench.schema import Record

PERCENTILES = (50, 90, 99)
# Of a curve: each half percent, and the far end more closely, where the slow ones are.
CURVE_PERCENTS = (*(number / 2 for number in range(199)), 99.5, 99.9, 100.0)
FAILURES_KEPT = 20


@dataclass(slots=True)
class Result:
    """All that was measured. `samples` maps what was timed to seconds, one entry a success.

    `rate` is successes a second over `wall`. `more` holds what only this shape has, by the keys of `Record`;
    `alive` None and `leaked` empty mean that the shape does not look. `steps` are the measurements of which
    this one is made.
    """

    shape: str
    backend: str
    count: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    wall: float = 0.0
    alive: int | None = None
    leaked: dict[str, int] = field(default_factory=dict)
    host: dict[str, object] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    baseline: Result | None = None
    steps: list[Result] = field(default_factory=list)

    def add(self, name: str, seconds: float) -> None:
        """One more success of what is called `name`."""
        self.samples.setdefault(name, []).append(seconds)

    @property
    def successes(self) -> int:
        """How many of the things that the shape is about went well."""
        return min((len(values) for values in self.samples.values()), default=0)

    @property
    def rate(self) -> float | None:
        return self.successes / self.wall if self.wall else None

    @property
    def clean(self) -> bool:
        """Nothing failed, all lived to the end, and nothing is left."""
        alive = self.alive is None or self.alive == self.count
        steps = all(step.clean for step in self.steps)
        return not self.failures and alive and not any(self.leaked.values()) and steps

    def record(self) -> Record:
        """What is written; see docs/benchmarks.md."""
        timed = {f"{name}_s": quantiles(values) for name, values in self.samples.items()}
        return Record.model_validate(
            {
                "shape": self.shape,
                "backend": self.backend,
                "count": self.count,
                "failed": len(self.failures),
                "wall_s": self.wall,
                **timed,
                "rate_per_s": self.rate,
                "alive_after_hold": self.alive,
                "leaked": self.leaked or None,
                "host": self.host,
                "curves": {name: curve(values) for name, values in self.samples.items() if values},
                **self.more,
                "sweep": [step.record() for step in self.steps] or None,
                "baseline": self.baseline.record() if self.baseline else None,
                "failures": self.distinct_failures()[:FAILURES_KEPT],
            }
        )

    def distinct_failures(self) -> list[str]:
        """One message of each kind: those that differ in numbers alone are of one."""
        kinds = {re.sub(r"[0-9.]+", "#", failure): failure for failure in reversed(self.failures)}
        return sorted(kinds.values())


def quantiles(values: list[float]) -> dict[str, float] | None:
    """p50, p90, p99 (nearest rank) and the maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    return {**ranks, "max": ordered[-1]}


def curve(values: list[float]) -> list[tuple[float, float]]:
    """The distribution: percent of the values, and the seconds that so many took at most."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [(percent, ordered[min(last, int(percent / 100 * len(ordered)))]) for percent in CURVE_PERCENTS]
