"""Losses that weigh the log-probability: `-weight * advantage * logprob`, the weight without a gradient.

The weight is a ratio `r = p_now / p_sampler`, of a token or of its whole sample, held within bounds. It
corrects for weights that have moved on since the token was drawn, and for the difference between the
sampler's implementation and the trainer's. All shapes are (L,).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl.losses.recipes import Objective
from rl.losses.tokens import PolicyTerm, Tokens


def truncated(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """Truncated importance sampling: weight `min(r_t, ratio_cap)`.

    The cap bounds the variance that the correction costs, and biases towards the sampler in return.
    Source: Ionides (2008); with policy gradients IMPALA (1802.01561).
    """
    return _truncate(tokens, tokens.log_ratio.detach(), objective)


def sequence_truncated(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """The same with the ratio of the sample, `min(prod_t r_t, ratio_cap)`, for each of its tokens.

    Unbiased for the sample's gradient but for the cap, where the token's ratio ignores that the tokens
    before it were drawn by the sampler too; its variance grows with the length.
    Source: Liu, Li et al., When Speed Kills Stability (2025).
    """
    return _truncate(tokens, _sample_log_ratio(tokens), objective)


def masked(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """Masked importance sampling: weight `r_t` within `[ratio_floor, ratio_cap]`, 0 outside.

    A masked token still counts in the mean. Source: IcePop, in Ring-1T (2510.18855).
    """
    return _mask(tokens, tokens.log_ratio.detach(), objective)


def sequence_masked(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """The same with the ratio of the sample: outside the bounds the whole sample is left out.

    Source: Liu, Li et al., When Speed Kills Stability (2025).
    """
    return _mask(tokens, _sample_log_ratio(tokens), objective)


def cispo(tokens: Tokens, objective: Objective) -> PolicyTerm:
    """Clipped weights, no token dropped: weight `clip(r_t, 1 - clip_low, 1 + clip_high)`.

    With `clip_low` 1 there is no lower bound, and this is truncation at `1 + clip_high`.
    Source: MiniMax-M1 (2506.13585).
    """
    log_ratio = tokens.log_ratio.detach()
    low, high = _log(1 - objective.clip_low), math.log1p(objective.clip_high)
    clipped = (log_ratio < low) | (log_ratio > high)
    return _weigh(tokens, torch.exp(log_ratio.clamp(low, high)), clipped)


def _truncate(tokens: Tokens, log_ratio: Tensor, objective: Objective) -> PolicyTerm:
    """The exponent is clamped, not its result, so that a gap of 100 nats stays finite."""
    cap = math.log(objective.ratio_cap)
    return _weigh(tokens, torch.exp(log_ratio.clamp(max=cap)), log_ratio > cap)


def _mask(tokens: Tokens, log_ratio: Tensor, objective: Objective) -> PolicyTerm:
    cap = math.log(objective.ratio_cap)
    outside = (log_ratio > cap) | (log_ratio < _log(objective.ratio_floor))
    ratio = torch.exp(log_ratio.clamp(max=cap))
    return _weigh(tokens, torch.where(outside, torch.zeros_like(ratio), ratio), outside)


def _weigh(tokens: Tokens, weight: Tensor, clipped: Tensor) -> PolicyTerm:
    return PolicyTerm(-weight * tokens.advantages * tokens.logprobs, weight, clipped)


def _sample_log_ratio(tokens: Tokens) -> Tensor:
    """The log ratio of each token's whole sample."""
    return tokens.per_sample(tokens.log_ratio.detach())[tokens.samples]


def _log(bound: float) -> float:
    """A lower bound of 0 bounds nothing."""
    return math.log(bound) if bound > 0 else -math.inf
