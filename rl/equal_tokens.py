"""Compares two ways of training by what their runs had learned after equally many trained tokens.

Steps and seconds say little: an arm whose groups are often silent trains on fewer tokens a step. So each run
becomes a curve, the held-out solve rate over the tokens trained so far, and runs are compared where both have
been. Seeds are compared in pairs, since runs of one seed have the engine's chance in common.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl.errors import ConfigError

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Where along the shortest run the arms are compared."""

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a two-sided 95 % interval, by the number of pairs; `T_MANY` beyond them."""
T_MANY = 2.2


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: `tokens` trained so far, rising, and at each of them a held-out solve rate in [0, 1].

    `spent` is what the run had done when it ended, by name, for a reader who asks why.
    """

    tokens: tuple[float, ...]
    rates: tuple[float, ...]
    spent: Mapping[str, float]

    @property
    def end(self) -> float:
        return self.tokens[-1]

    def at(self, tokens: float) -> float:
        """The rate after so many trained tokens, on the straight line between two measurements."""
        place = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[place - 1], self.tokens[place]
        part = min(max((tokens - low) / (high - low), 0.0), 1.0)
        return self.rates[place - 1] + part * (self.rates[place] - self.rates[place - 1])

    def mean_until(self, tokens: float) -> float:
        """The mean rate from the first token to this one: how fast it was learned, with less noise than at
        one point."""
        inner = [place for place in self.tokens if place < tokens]
        places = [*inner, tokens]
        parts = pairwise(places)
        return sum((b - a) * (self.at(a) + self.at(b)) / 2 for a, b in parts) / tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one comparison: both arms' mean rates, the mean of the pairs' differences and its 95 % interval.

    `low` and `high` are None for a single pair, which has no spread.
    """

    what: str
    first: float
    second: float
    mean: float
    low: float | None
    high: float | None
    pairs: tuple[float, ...]

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "one seed alone tells nothing"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "no difference shown"


def read_curve(run: Path) -> Curve:
    """The curve of a finished run. Raises ConfigError where it was not measured along the way."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run} holds no finished run: {error}") from error
    points = [(0.0, _overall(summary["heldout"]["before"]))]
    trained = 0.0
    for row in rows:
        trained += row.get("train/tokens", 0.0)
        if "heldout/overall" in row:
            points.append((trained, row["heldout/overall"]))
    points.append((trained, _overall(summary["heldout"]["after"])))
    # Two measurements of the same weights are one of twice as many attempts.
    by_tokens: dict[float, list[float]] = {}
    for tokens, rate in points:
        if rate is not None:
            by_tokens.setdefault(tokens, []).append(rate)
    if len(by_tokens) < 2:
        raise ConfigError(f"{run} was measured at fewer than two points: set heldout.every_steps")
    rates = tuple(statistics.fmean(rates) for rates in by_tokens.values())
    return Curve(tuple(by_tokens), rates, _spent(summary, rows))


def _overall(measured: Mapping[str, Any]) -> float | None:
    value = measured.get("overall")
    return None if value is None else float(value)


def _spent(summary: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    played = sum(value for row in rows for name, value in row.items() if name.startswith("groups/"))
    silent = sum(row.get("groups/zero_advantage", 0.0) for row in rows)
    trained = max(float(summary["trained_tokens"]), 1.0)
    return {
        "trained tokens": float(summary["trained_tokens"]),
        "generated tokens for each": float(summary["generated_tokens"]) / trained,
        "steps": float(summary["steps"]),
        "trained tokens a step": trained / max(float(summary["steps"]), 1.0),
        "groups without a signal": silent / max(played, 1.0),
        "seconds of the loop": float(summary["loop_s"]),
        "held-out at the end": float(_overall(summary["heldout"]["after"]) or 0.0),
    }


def compare(first: Sequence[Curve], second: Sequence[Curve]) -> tuple[float, list[Difference]]:
    """The tokens that all runs have trained, and how the first arm differs there and before. Runs are paired
    in their order."""
    tokens = min(curve.end for curve in (*first, *second))
    found = [
        difference(
            f"after {share:.0%} of them",
            [curve.at(share * tokens) for curve in first],
            [curve.at(share * tokens) for curve in second],
        )
        for share in SHARES
    ]
    means = ([curve.mean_until(tokens) for curve in arm] for arm in (first, second))
    return tokens, [*found, difference("mean all along", *means)]


def difference(what: str, first: Sequence[float], second: Sequence[float]) -> Difference:
    """Of values in pairs; the interval is Student's."""
    pairs = tuple(one - other for one, other in zip(first, second, strict=True))
    mean = statistics.fmean(pairs)
    low = high = None
    if len(pairs) > 1:
        half = T_95.get(len(pairs), T_MANY) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        low, high = mean - half, mean + half
    return Difference(what, statistics.fmean(first), statistics.fmean(second), mean, low, high, pairs)
