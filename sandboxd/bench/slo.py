"""What a measurement is held to: `--slo "p99_ready<2s,failed=0"`.

terms    = term {"," term}
term     = measure operator number [unit]
measure  = ("p50" | "p90" | "p99" | "max") "_" time | count
operator = "<" | "<=" | ">" | ">=" | "="
unit     = "us" | "ms" | "s" (of times), "%" (of rates and of `failed`)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandboxd.bench.phases import PHASES
from sandboxd.bench.result import Result
from sandboxd.bench.schema import Record

POINTS = ("p50", "p90", "p99", "max")
# What is timed; a phase is named `phase_…` where a time of the same name is measured, too.
TIMES = (
    "ready", "acquire", "exec", "release", "exec_at_once", "exec_beside_bombs", "rollout", "fill", "health",
    "late", *(f"phase_{name}" for name in PHASES),
)  # fmt: skip
COUNTS: dict[str, Callable[[Record], float | None]] = {
    "failed": lambda record: record.failed,
    "retries": lambda record: record.retries,
    "leaked": lambda record: sum((record.leaked or {}).values()) if record.leaked is not None else None,
    "alive": lambda record: record.alive_after_hold,
    "rate": lambda record: record.rate_per_s,
    "success": lambda record: record.success_rate,
    "wall": lambda record: record.wall_s,
}
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TERM = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>|=)\s*([0-9]*\.?[0-9]+)\s*(us|ms|s|%)?\s*")


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that must hold; `bound` in seconds where `measure` is a time."""

    text: str
    measure: str
    operator: str
    bound: float
    percent: bool = False

    def measured(self, record: Record) -> float | None:
        """In the bound's unit; None where the record does not tell."""
        if self.measure in COUNTS:
            value = COUNTS[self.measure](record)
            if self.percent and self.measure == "failed" and value is not None:
                return value / record.count if record.count else None
            return value
        point, _, name = self.measure.partition("_")
        if name.startswith("phase_"):
            times = None if record.phases is None else getattr(record.phases, name.removeprefix("phase_"))
        else:
            times = getattr(record, f"{name}_s")
        return None if times is None else float(getattr(times, point))

    def met(self, record: Record) -> bool:
        """What was not measured is not met: a load of which nothing was served keeps no promise."""
        value = self.measured(record)
        return value is not None and OPERATORS[self.operator](value, self.bound)


def parse(text: str) -> list[Term]:
    """Raises ValueError with one line that says what is allowed."""
    return [_term(word) for word in text.split(",")]


def _term(text: str) -> Term:
    found = TERM.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text.strip()!r} is no term of an SLO: write a measure, one of {' '.join(OPERATORS)}, and a"
            " number, as in p99_ready<2s or failed=0"
        )
    measure, sign, number, unit = found.groups()
    point, _, name = measure.partition("_")
    timed = point in POINTS and name in TIMES
    if not timed and measure not in COUNTS:
        raise ValueError(
            f"{measure!r} is not measured: name {', '.join(COUNTS)}, or {', '.join(POINTS)} with one of"
            f" {', '.join(TIMES)} after it, as in p99_ready"
        )
    return Term(text.strip(), measure, sign, float(number) * _factor(text, measure, unit), unit == "%")


def _factor(text: str, measure: str, unit: str | None) -> float:
    """What the number is multiplied by. Raises ValueError."""
    if measure in ("failed", "success"):
        if unit in (None, "%"):
            return 0.01 if unit else 1.0
        raise ValueError(f"{text.strip()!r}: {measure} is a number or has %, not {unit}")
    if measure in COUNTS and measure != "wall":
        if unit is None:
            return 1.0
        raise ValueError(f"{text.strip()!r}: {measure} is a number without a unit")
    if unit in SECONDS:
        return SECONDS[unit]
    raise ValueError(f"{text.strip()!r}: a time needs a unit, one of {', '.join(SECONDS)}")


def judge(terms: Sequence[Term], result: Result) -> list[str]:
    """Enters into the result, or into each step of a sweep, what was met; returns a line for each miss."""
    if result.steps:
        return [line for step in result.steps for line in judge(terms, step)]
    record = result.record()
    result.more["slo"] = [
        {"term": term.text, "measured": term.measured(record), "met": term.met(record)} for term in terms
    ]
    return [
        f"{term.text} is missed: {_said(term, record)} ({record.shape} of {record.count} on {record.backend})"
        for term in terms
        if not term.met(record)
    ]


def _said(term: Term, record: Record) -> str:
    value = term.measured(record)
    if value is None:
        return "it was not measured"
    if term.percent:
        return f"{value:.2%}"
    return f"{value:.4g}" if term.measure in COUNTS and term.measure != "wall" else f"{value:.4g} s"
