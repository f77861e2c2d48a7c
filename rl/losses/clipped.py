"""Losses with PPO's clipped surrogate: `-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`.

The ratio `r` carries the gradient, of which a token past its bound has none. The policy that it divides
by is the sampler's, as recorded when the token was drawn: recomputing it would make every ratio 1 and
hide that the sampler was another policy. All shapes are (L,).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl.losses.recipes import Objective
from rl.losses.tokens import LOG_RATIO_LIMIT, PolicyTerm, Tokens


def clipped(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """The surrogate of each token's ratio. GRPO, Dr. GRPO and DAPO share it and differ in the mean, in
    the advantages and in the bounds (`rl.losses.recipes`).

    Source: PPO (1707.06347), equation 7; GRPO in DeepSeekMath (2402.03300), equation 3; Dr. GRPO
    (2503.20783); DAPO with its higher upper bound (2503.14476).
    """
    return _surrogate(tokens.log_ratio, tokens.advantages, objective)


def gspo(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """The surrogate of the sample's ratio, `(prod_t r_t) ^ (1 / length)`, for each of its tokens.

    Their mean over the sample is the sample's surrogate, and so is its gradient.
    Source: GSPO (2507.18071).
    """
    log_ratio = tokens.per_sample(tokens.log_ratio) / tokens.lengths
    return _surrogate(log_ratio[tokens.samples], tokens.advantages, objective)


def decoupled(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """`min(p_prox / p_sampler, ratio_cap)` times the surrogate of `p_now / p_prox`.

    The clip holds the update near the proximal policy, the weight corrects for the sampler: two jobs
    that PPO's one ratio does at once, badly when the sampler is old. At the only update that a batch
    gets, the proximal policy is the present one, the ratio 1, and nothing is clipped. The cap on the
    weight is not in the paper.
    Source: Hilton et al. (2110.00641); for language models AReaL (2505.24298).
    """
    cap = math.log(objective.ratio_cap)
    behind = tokens.proximal_log_ratio
    weight = torch.exp(behind.clamp(max=cap))
    surrogate = _surrogate(tokens.log_ratio - behind, tokens.advantages, objective)
    return PolicyTerm(weight * surrogate.loss, weight, surrogate.clipped | (behind > cap))


def _surrogate(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> PolicyTerm:
    """Beyond `LOG_RATIO_LIMIT` the ratio is constant, so that the unclipped side stays finite as well."""
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    above = (advantages > 0) & (ratio > high)
    below = (advantages < 0) & (ratio < low)
    bound = torch.where(above, torch.full_like(ratio, high), torch.full_like(ratio, low))
    bounded = above | below
    return PolicyTerm(-torch.where(bounded, bound, ratio) * advantages, ratio.detach(), bounded)
