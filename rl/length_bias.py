"""Measures how much shorter the episodes are that are trained on than those that were played.

A policy that gives up what is late gives up what is long, and with it what is hard: the trained data are no
longer distributed as the tasks are. The measure counts sampled tokens. What was given up had not ended, so
its tokens so far are a lower bound, and the true bias is at least as large as the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl.ledger import Account, Fate

LATE = frozenset({"stale", "cancelled:late", "cancelled:spare", "cancelled:timeout"})
"""Reasons for which an episode is discarded because of the time that it took."""

STATE = ("trained", "late", "trained_tokens", "late_tokens")


class LengthBias:
    """Counts and sums of tokens of the episodes of one run: trained, and discarded for being late."""

    def __init__(self, state: Mapping[str, int] | None = None) -> None:
        """With `state`, what `state_dict` returned, it goes on from there."""
        past = state or dict.fromkeys(STATE, 0)
        self.trained_count, self.late_count, self._trained_tokens, self._late_tokens = (
            past[name] for name in STATE
        )

    def state_dict(self, settled: Sequence[tuple[Account, Fate, str]] = ()) -> dict[str, int]:
        """For a checkpoint; `settled` are episodes whose fate is known already, though not yet noted."""
        values = (self.trained_count, self.late_count, self._trained_tokens, self._late_tokens)
        state = dict(zip(STATE, values, strict=True))
        copy = LengthBias(state)
        for account, fate, reason in settled:
            copy.note(account.tokens, fate, reason)
        return copy.state_dict() if settled else state

    def note(self, tokens: int, fate: Fate, reason: str) -> None:
        """One episode of `tokens` sampled tokens met its fate."""
        if fate is Fate.TRAINED:
            self.trained_count += 1
            self._trained_tokens += tokens
        elif reason in LATE:
            self.late_count += 1
            self._late_tokens += tokens

    @property
    def late_share(self) -> float:
        """Late episodes of all that were trained or late, in [0, 1]."""
        return self.late_count / max(self.trained_count + self.late_count, 1)

    @property
    def trained_mean(self) -> float:
        """Mean tokens of a trained episode; 0 before the first."""
        return self._trained_tokens / max(self.trained_count, 1)

    @property
    def bias(self) -> float:
        """Mean tokens of a trained episode, relative to one that was trained or late, minus 1; 0 for none."""
        count = self.trained_count + self.late_count
        everything = self._trained_tokens + self._late_tokens
        if not self.trained_count or not everything:
            return 0.0
        return self.trained_mean / (everything / count) - 1.0

    def as_dict(self) -> dict[str, float | int]:
        """As it goes into `summary.json`."""
        return {
            "bias": self.bias,
            "late_share": self.late_share,
            "late_episodes": self.late_count,
            "trained_tokens_mean": self.trained_mean,
        }

    def row(self) -> dict[str, float]:
        """As it goes into a step's row; nothing while nothing was late."""
        if not self.late_count:
            return {}
        return {"queue/late_share": self.late_share, "queue/length_bias": self.bias}
