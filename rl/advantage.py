"""Turns the rewards of one group into advantages, from the scored episodes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl.types import Episode, Group

MIN_SCORED = 2
"""One episode has nothing to be compared with."""

MIN_DEVIATION = 1e-6
"""Below this the rewards are equal but for rounding, and dividing by it would only amplify that."""


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """How rewards become advantages.

    `by_deviation` divides by the deviation of the group's rewards. An episode is allowed `limit_tokens`
    sampled tokens and loses up to 1 of its reward over the last `overlong_tokens` of them; never when 0.
    """

    by_deviation: bool = True
    overlong_tokens: int = 0
    limit_tokens: int = 0


DEFAULT_RULE = AdvantageRule()


def group_relative(rewards: npt.ArrayLike, *, by_deviation: bool = True) -> npt.NDArray[np.float64] | None:
    """Advantages `(r - mean) / std` of the rewards of one group, shape `(n,)`, no unit.

    The deviation is the population's (divisor n), so that duplicating every member changes nothing.
    Without `by_deviation` they are `r - mean`, in units of reward.
    None when fewer than two rewards are given or all are equal: such a group carries no signal.
    Raises ValueError on a reward that is not finite.
    Source: DeepSeekMath (2402.03300), section 4.1.1; undivided, Dr. GRPO (2503.20783).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards {values.tolist()} are not all finite")
    if len(values) < MIN_SCORED:
        return None
    deviation = values.std()
    if deviation < MIN_DEVIATION:
        return None
    advantages: npt.NDArray[np.float64] = values - values.mean()
    return advantages / deviation if by_deviation else advantages


def overlong_penalty(length: int, rule: AdvantageRule) -> float:
    """What an episode of `length` sampled tokens loses of its reward, from 0 to -1, in units of reward.

    With limit M and margin C: 0 up to M - C tokens, then `(M - C - length) / C`, and -1 from M on.
    Source: soft overlong punishment, DAPO (2503.14476).
    """
    if rule.overlong_tokens == 0:
        return 0.0
    excess = length - (rule.limit_tokens - rule.overlong_tokens)
    return -min(max(excess / rule.overlong_tokens, 0.0), 1.0)


def scored_advantages(
    group: Group, rule: AdvantageRule = DEFAULT_RULE
) -> tuple[tuple[Episode, float], ...] | None:
    """Each scored episode that sampled a token, with its advantage; None when there is no signal.

    Members that infrastructure left unscored take no part: the mean and the deviation are those of
    the others, and no reward is ever invented for them. Rewards that the verifier gave equally carry no
    signal whatever the lengths are: shaping alone would teach a group that all failed to fail briefly.
    """
    members = [episode for episode in group.scored if episode.sampled_count > 0]
    rewards = [episode.reward for episode in members if episode.reward is not None]
    if group_relative(rewards) is None:
        return None
    shaped = [
        reward + overlong_penalty(episode.sampled_count, rule)
        for episode, reward in zip(members, rewards, strict=True)
    ]
    advantages = group_relative(shaped, by_deviation=rule.by_deviation)
    if advantages is None:
        return None
    return tuple((episode, float(a)) for episode, a in zip(members, advantages, strict=True))
