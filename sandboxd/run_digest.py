"""What is shown of a training run, on the live page and by `sandboxd top`: which numbers of its steps, under
which words. Whatever names a metric of the loop for a person stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandboxd.overview import Row

SHARE = "share"
FAMILY = "solve_rate/"


@dataclass(frozen=True, slots=True)
class Shown:
    """A metric as a person reads it. `unit` is SHARE for what lies from 0 to 1."""

    title: str
    key: str
    unit: str = ""


FACTS = (
    Shown("Trainer waits", "perf/wait_time_ratio", SHARE),
    Shown("Generator idle", "perf/generator_idle_ratio", SHARE),
    Shown("Groups ready", "buffer/ready"),
    Shown("Episodes under way", "rollout/inflight"),
    Shown("Versions stale, on average", "off_policy/mean"),
    Shown("Versions stale, at most", "off_policy/max"),
    Shown("Sampled", "rollout/generated_tok_s", "tokens/s"),
    Shown("Trained", "perf/trained_tok_s", "tokens/s"),
    Shown("Sandboxes active", "sandbox/active"),
    Shown("Sandboxes warm", "sandbox/warm"),
    Shown("Callers waiting", "sandbox/waiting"),
    Shown("Failed starts", "sandbox/start_failures"),
)
CHARTS = (
    Shown("Trainer waits", "perf/wait_time_ratio", SHARE),
    Shown("Groups ready", "buffer/ready"),
    Shown("Tokens sampled a second", "rollout/generated_tok_s"),
    Shown("Sandboxes active", "sandbox/active"),
)
KEYS = frozenset(shown.key for shown in (*FACTS, *CHARTS))
"""Beside the solve rates all that is kept of a step."""


def facts(last: Mapping[str, float]) -> list[list[str]]:
    """Title and value of each, of the last step."""
    return [[shown.title, written(last.get(shown.key), shown.unit)] for shown in FACTS]


def families(steps: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The first and the latest solve rate of each family, from 0 to 1, by its name."""
    found: dict[str, dict[str, float]] = {}
    for step in steps:
        for key, value in step.items():
            if key.startswith(FAMILY):
                found.setdefault(key.removeprefix(FAMILY), {"first": value})["latest"] = value
    return dict(sorted(found.items()))


def charts() -> list[Row]:
    """What is drawn over the steps, beside the solve rates."""
    return [{"title": shown.title, "key": shown.key, "share": shown.unit == SHARE} for shown in CHARTS]


def written(value: float | None, unit: str = "") -> str:
    """A number for a person."""
    if value is None:
        return "-"
    if unit == SHARE:
        return percent(value)
    number = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2g}"
    return f"{number} {unit}".rstrip()


def percent(value: float) -> str:
    """Of what lies from 0 to 1."""
    return f"{value:.1%}".replace("%", " %") if 0 < abs(value) < 0.1 else f"{value:.0%}".replace("%", " %")
