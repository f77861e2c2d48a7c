"""Estimates of the divergence KL(now || reference), one a token, from tokens that were drawn once.

With `d = log p_reference - log p_now` of the drawn token. Two different questions, for tokens drawn from the
present policy: does the estimate's mean equal the divergence, and does the mean of its gradient, when it
serves as a loss, equal the divergence's gradient?

| estimate | value | gradient |
|---|---|---|
| k1 = -d | unbiased, large variance, either sign | 0 in the mean: useless as a loss |
| k2 = d^2 / 2 | biased, small near 0 | unbiased |
| k3 = e^d - 1 - d | unbiased, never negative | that of KL(reference, now), the other way round |

For tokens of an older policy none is exact; no importance weight is applied here. The divergence is that of
each token given those before it: how early tokens change what follows is not in the gradient.
Sources: Schulman, Approximating KL Divergence (2020); Tang and Munos (2506.09477).
Shapes (L,), nats. `d` is limited to `LOG_RATIO_LIMIT` either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl.losses.tokens import LOG_RATIO_LIMIT


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return -_difference(logprobs, reference_logprobs)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return _difference(logprobs, reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    difference = _difference(logprobs, reference_logprobs)
    return torch.expm1(difference) - difference


def _difference(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return (reference_logprobs.detach() - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
