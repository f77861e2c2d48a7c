"""The policy loss on tensors: per-token log-probabilities, and importance weights truncated from above.

Shapes: T packed tokens, L loss tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LOG_RATIO_LIMIT = 20.0
"""The KL estimate is a statistic, not a loss: beyond e^20 a larger number says nothing more."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the loss tokens of one pass; divide by `token_count` summed over a batch for its means.

    `loss` carries the gradient. `masked_count` counts tokens whose sampler log-probability was missing
    or not finite: they take no part in any sum, nor in `token_count`.
    """

    loss: Tensor
    token_count: int
    masked_count: int
    ratio_sum: float
    clipped_count: float
    kl_sum: float
    entropy_sum: float


def token_logprobs(hidden_ld: Tensor, head_vd: Tensor, targets_l: Tensor) -> Tensor:
    """Log-probability of each target, shape (L,), float32, at temperature 1 over the whole vocabulary."""
    logits_lv = functional.linear(hidden_ld, head_vd).float()
    return -functional.cross_entropy(logits_lv, targets_l, reduction="none")


def truncated_importance_loss(
    logprobs_l: Tensor, sampler_logprobs_l: Tensor, advantages_l: Tensor, *, cap: float
) -> LossSums:
    """Sum of `-min(ratio, cap) * advantage * logprob`, the ratio held constant in the gradient.

    `ratio = p_now(token) / p_sampler(token)` corrects for weights that have moved on since the token was
    drawn and for the difference between the two implementations; the cap bounds the variance that the
    correction costs. The exponent is clamped, not its result, so a gap of 100 nats stays finite.
    Source: truncated importance sampling, Ionides (2008); with policy gradients IMPALA (1802.01561).
    """
    usable = torch.isfinite(sampler_logprobs_l)
    zero = torch.zeros_like(logprobs_l)
    log_ratio = torch.where(usable, logprobs_l.detach() - sampler_logprobs_l, zero)
    weight = torch.exp(log_ratio.clamp(max=math.log(cap)))
    per_token = torch.where(usable, -weight * advantages_l * logprobs_l, zero)
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    count = int(usable.sum())
    return LossSums(
        loss=per_token.sum(),
        token_count=count,
        masked_count=len(usable) - count,
        ratio_sum=float(torch.where(usable, weight, zero).sum()),
        clipped_count=float((log_ratio > math.log(cap)).sum()),
        kl_sum=float((torch.expm1(bounded) - bounded).sum()),
        entropy_sum=float(torch.where(usable, -logprobs_l.detach(), zero).sum()),
    )
