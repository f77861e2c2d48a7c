"""What is measured at each step: names in one place, gathered between two steps.

Names follow those in use elsewhere where one exists. Suffix `_s` is seconds, `_tok_s` tokens a second,
`_rate` times a second but in `solve_rate`; ratios lie in [0, 1]; everything else is a count.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable

from rl.ledger import Fate
from rl.player import Played
from rl.types import StepReport, Unscored

Row = dict[str, float]


class Interval:
    """What happened since the step before."""

    def __init__(self) -> None:
        self._rewards: defaultdict[str, list[float]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._durations: list[float] = []
        self._tool_seconds = 0.0
        self._turns = 0
        self._tokens = 0

    def group_played(self, members: Iterable[Played], fate: str) -> None:
        """A group ended; `fate` is `ready`, or why it was dropped."""
        self._counts[f"groups/{fate}"] += 1
        rewards = []
        for member in members:
            episode = member.episode
            self._counts[f"stop/{episode.stop_reason}"] += 1
            if isinstance(episode.outcome, Unscored):
                self._counts[f"error/{episode.outcome.kind}"] += 1
            if episode.reward is not None:
                rewards.append(episode.reward)
                self._rewards[episode.task.family].append(episode.reward)
            self._durations.append(episode.wall_seconds)
            self._tool_seconds += episode.tool_seconds
            self._turns += len(episode.turns)
            self._tokens += episode.sampled_count
        if rewards:
            solved = "all" if min(rewards) > 0 else "none" if max(rewards) == 0 else "some"
            self._counts[f"solved_{solved}"] += 1

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def row(self, seconds: float) -> Row:
        """Everything as one flat row; `seconds` is the length of the interval."""
        row: Row = {name: float(value) for name, value in self._counts.items()}
        everything = [reward for rewards in self._rewards.values() for reward in rewards]
        if everything:
            row["solve_rate/all"] = statistics.fmean(everything)
        for family, rewards in self._rewards.items():
            row[f"solve_rate/{family}"] = statistics.fmean(rewards)
        episodes = len(self._durations)
        row["rollout/episodes"] = episodes
        row["rollout/generated_tokens"] = self._tokens
        row["rollout/generated_tok_s"] = self._tokens / max(seconds, 1e-9)
        if episodes:
            row["rollout/duration_s"] = statistics.fmean(self._durations)
            row["rollout/tool_s"] = self._tool_seconds / episodes
            row["rollout/turns_mean"] = self._turns / episodes
            row["rollout/tokens_mean"] = self._tokens / episodes
        return row


def training_row(report: StepReport) -> Row:
    """The trainer's part of a step's row."""
    return {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/mean_ratio": report.mean_ratio,
        "train/clipped_fraction": report.clipped_fraction,
        "mismatch_kl": report.mismatch_kl,
        "train/tokens": report.trained_tokens,
        "train/forwarded_tokens": report.forwarded_tokens,
        "train/unshared_tokens": report.unshared_tokens,
        "perf/trained_tok_s": report.trained_tokens / max(report.train_seconds, 1e-9),
        **{f"train/{name}": value for name, value in report.extra.items()},
    }


def latency_row(name: str, seconds: list[float]) -> Row:
    """Median and maximum of some latencies, under `name`; empty when there were none."""
    if not seconds:
        return {}
    return {f"{name}_p50_s": statistics.median(seconds), f"{name}_max_s": max(seconds)}


def wait_ratio(waiting: float, training: float) -> float:
    """Share of the time that the trainer had nothing to train: waiting / (waiting + training).

    Waiting is all the time between two steps, so also that of making the weights live.
    """
    total = waiting + training
    return waiting / total if total > 0 else 0.0


def fate_of(member: Played, group_reason: str | None) -> tuple[Fate, str]:
    """What becomes of one episode when its group is trained (None) or dropped for `group_reason`.

    What infrastructure did to an episode is named first: it was lost before its group was judged.
    """
    episode = member.episode
    if isinstance(episode.outcome, Unscored):
        return Fate.DISCARDED, f"unscored:{episode.outcome.kind}"
    if episode.reward is None:
        return Fate.DISCARDED, f"cancelled:{getattr(episode.outcome, 'reason', 'unknown')}"
    if group_reason is not None:
        return Fate.DISCARDED, group_reason
    if episode.sampled_count == 0:
        return Fate.DISCARDED, "empty"
    return Fate.TRAINED, ""
