"""pass@k with its confidence interval. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

RESAMPLES = 10_000
CHUNK = 500
"""Resamples drawn at once, which bounds memory to 4 kB a task."""


@dataclass(frozen=True, slots=True)
class Tally:
    """`solved` of the `scored` attempts at one task. Attempts without a verdict are not among them."""

    scored: int
    solved: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """pass@`k` in [0, 1] over `tasks` tasks, and its interval; `left_out` tasks had fewer than k attempts."""

    k: int
    value: float
    low: float
    high: float
    tasks: int
    left_out: int
    method: Literal["bootstrap", "wilson"]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def pass_at_k(tally: Tally, k: int) -> float:
    """The chance that one of k attempts solves the task, without bias: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1;
    as a product, which stays finite. Raises ValueError when fewer than k attempts were scored.
    """
    n, c = tally.scored, tally.solved
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {c} solved of {n}: k must lie in 1 to {n}, solved in 0 to {n}")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def estimate(tallies: Sequence[Tally], k: int, *, confidence: float = 0.95, seed: int = 0) -> Estimate | None:
    """The mean of pass@k over tasks, or None when no task has k scored attempts.

    The interval is the percentile bootstrap over tasks (Efron 1979): tasks, not attempts, are drawn again,
    for attempts at one task are not independent. Where every task has the same value, the bootstrap
    would claim certainty; Wilson's interval (1927) for that share of the tasks takes its place.
    """
    values = np.array([pass_at_k(tally, k) for tally in tallies if tally.scored >= k])
    if not len(values):
        return None
    mean = float(values.mean())
    method: Literal["bootstrap", "wilson"] = "bootstrap"
    if np.ptp(values) == 0.0:
        method = "wilson"
        low, high = wilson(mean, len(values), confidence)
    else:
        rng = np.random.default_rng(seed)
        draws = [
            values[rng.integers(0, len(values), (CHUNK, len(values)))].mean(axis=1)
            for _ in range(RESAMPLES // CHUNK)
        ]
        tail = (1.0 - confidence) / 2
        low, high = (float(edge) for edge in np.quantile(np.concatenate(draws), [tail, 1.0 - tail]))
    return Estimate(k, mean, low, high, len(values), len(tallies) - len(values), method)


def wilson(share: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share of `trials` (1927, J. Am. Stat. Assoc. 22:209)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At the ends the two terms are equal, but for rounding.
    low = 0.0 if share == 0.0 else (centre - half) / scale
    return low, 1.0 if share == 1.0 else (centre + half) / scale
