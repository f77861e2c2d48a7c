"""The tokens of one pass as the losses see them, and what all losses compute of them.

Shapes: L loss tokens, S samples, D hidden width, V vocabulary. Log-probabilities and ratios are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LOG_RATIO_LIMIT = 20.0
"""No exponent goes beyond it: e^20 tells as much as e^100, which is infinite in float32."""


def token_logprobs(hidden_ld: Tensor, head_vd: Tensor, targets_l: Tensor) -> Tensor:
    """Log-probability of each target, shape (L,), float32, at temperature 1 over the whole vocabulary."""
    logits_lv = functional.linear(hidden_ld, head_vd).float()
    return -functional.cross_entropy(logits_lv, targets_l, reduction="none")


@dataclass(frozen=True, slots=True)
class PassTokens:
    """Loss tokens, flat: one entry a token, shape (L,), unless said otherwise.

    `logprobs` under the present weights carry the gradient; `sampler_logprobs` are those with which the
    tokens were drawn, not finite where they are missing. `samples` says to which of `sample_count`
    samples a token belongs, from 0. `reference_logprobs` are those under the reference model.
    `proximal_logprobs` are those under the weights around which decoupled PPO clips; None where these
    are the present ones, as at the only update that a batch gets.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    samples: Tensor
    sample_count: int
    reference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """`PassTokens` after `usable_tokens`: tokens that take no part hold 0 throughout, so that nothing
    that is not finite can reach a sum or a gradient through them.

    `log_ratio` is `logprobs - sampler_logprobs` and carries the gradient. `lengths` (S,) counts the
    tokens of each sample that take part, at least 1.
    """

    usable: Tensor
    logprobs: Tensor
    log_ratio: Tensor
    proximal_log_ratio: Tensor
    advantages: Tensor
    samples: Tensor
    lengths: Tensor

    def per_sample(self, values: Tensor) -> Tensor:
        """Sums of a per-token value over each sample, shape (S,)."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.samples, values)


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """What a loss makes of each token, shapes (L,).

    `loss` carries the gradient; `weight` is the ratio that multiplies the token's gradient, or would
    without the clip; `clipped` marks tokens whose weight or objective a bound holds.
    """

    loss: Tensor
    weight: Tensor
    clipped: Tensor


def usable_tokens(inputs: PassTokens) -> Tokens:
    """Leaves out the tokens whose sampler log-probability is missing or not finite.

    Selected before any arithmetic: a product with a mask keeps 0 * inf, and so does its gradient.
    """
    usable = torch.isfinite(inputs.sampler_logprobs)
    zero = torch.zeros_like(inputs.logprobs)
    logprobs = torch.where(usable, inputs.logprobs, zero)
    sampler = torch.where(usable, inputs.sampler_logprobs, zero)
    proximal = logprobs.detach()
    if inputs.proximal_logprobs is not None:
        proximal = torch.where(usable, inputs.proximal_logprobs.detach(), zero)
    counts = zero.new_zeros(inputs.sample_count).index_add(0, inputs.samples, usable.to(zero.dtype))
    return Tokens(
        usable=usable,
        logprobs=logprobs,
        log_ratio=logprobs - sampler,
        proximal_log_ratio=proximal - sampler,
        advantages=torch.where(usable, inputs.advantages, zero),
        samples=inputs.samples,
        lengths=counts.clamp(min=1.0),
    )
