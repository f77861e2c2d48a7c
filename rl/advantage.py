"""Turns the rewards of one group into advantages, from the scored episodes alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl.types import Episode, Group

MIN_SCORED = 2
"""One episode has nothing to be compared with."""

MIN_DEVIATION = 1e-6
"""Below this the rewards are equal but for rounding, and dividing by it would only amplify that."""


def group_relative(rewards: npt.ArrayLike) -> npt.NDArray[np.float64] | None:
    """Advantages `(r - mean) / std` of the rewards of one group, shape `(n,)`, no unit.

    The deviation is the population's (divisor n), so that duplicating every member changes nothing.
    None when fewer than two rewards are given or all are equal: such a group carries no signal.
    Raises ValueError on a reward that is not finite.
    Source: DeepSeekMath (2402.03300), section 4.1.1.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards {values.tolist()} are not all finite")
    if len(values) < MIN_SCORED:
        return None
    deviation = values.std()
    if deviation < MIN_DEVIATION:
        return None
    advantages: npt.NDArray[np.float64] = (values - values.mean()) / deviation
    return advantages


def scored_advantages(group: Group) -> tuple[tuple[Episode, float], ...] | None:
    """Each scored episode that sampled a token, with its advantage; None when there is no signal.

    Members that infrastructure left unscored take no part: the mean and the deviation are those of
    the others, and no reward is ever invented for them.
    """
    members = [(episode, episode.reward) for episode in group.scored if episode.sampled_count > 0]
    advantages = group_relative([reward for _, reward in members if reward is not None])
    if advantages is None:
        return None
    return tuple((episode, float(a)) for (episode, _), a in zip(members, advantages, strict=True))
