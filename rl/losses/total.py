"""The loss of a pass: the named policy term, the divergence to a reference, and the mean over the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.losses import clipped, kl, weighted
from rl.losses.recipes import RECIPES, KlName, LossName, Objective, Totals
from rl.losses.tokens import LOG_RATIO_LIMIT, PassTokens, PolicyTerm, Tokens, usable_tokens

POLICY_TERMS: dict[LossName, Callable[[Tokens, Objective], PolicyTerm]] = {
    "tis": weighted.truncated,
    "mis": weighted.masked,
    "sequence_tis": weighted.sequence_truncated,
    "sequence_mis": weighted.sequence_masked,
    "grpo": clipped.clipped,
    "dr_grpo": clipped.clipped,
    "dapo": clipped.clipped,
    "gspo": clipped.gspo,
    "cispo": weighted.cispo,
    "decoupled_ppo": clipped.decoupled,
}
KL_ESTIMATES: dict[KlName, Callable[[Tensor, Tensor], Tensor]] = {"k2": kl.k2, "k3": kl.k3}


@dataclass(frozen=True, slots=True)
class LossSums:
    """The pass's share of the batch's loss, and sums over its loss tokens.

    `loss` carries the gradient; over the passes of a batch it adds up to the batch's loss. The sums
    divided by `token_count`, both summed over a batch, are its means. `masked_count` counts tokens whose
    sampler log-probability was missing or not finite: they take no part in any sum, nor in
    `token_count`. `kl_sum` is of the sampler, `reference_kl_sum` of the reference (0 without one), nats.
    """

    loss: Tensor
    token_count: int
    masked_count: int
    ratio_sum: float
    clipped_count: float
    kl_sum: float
    entropy_sum: float
    reference_kl_sum: float


def policy_loss(inputs: PassTokens, objective: Objective, totals: Totals) -> LossSums:
    """The loss `objective.loss` of one pass, of a batch with `totals`.

    Raises ValueError when the divergence is asked for and `inputs` has no reference log-probabilities.
    """
    tokens = usable_tokens(inputs)
    zero = torch.zeros_like(inputs.logprobs)
    term = POLICY_TERMS[objective.loss](tokens, objective)
    per_token = term.loss
    reference_kl = zero
    if inputs.reference_logprobs is not None:
        reference = torch.where(tokens.usable, inputs.reference_logprobs, zero)
        reference_kl = kl.k3(tokens.logprobs.detach(), reference)
    if objective.kl_coefficient > 0:
        if inputs.reference_logprobs is None:
            raise ValueError(f"kl_coefficient {objective.kl_coefficient} needs reference log-probabilities")
        divergence = KL_ESTIMATES[objective.kl_estimator](tokens.logprobs, reference)
        per_token = per_token + objective.kl_coefficient * divergence
    log_ratio = tokens.log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    count = int(tokens.usable.sum())
    return LossSums(
        loss=_mean(torch.where(tokens.usable, per_token, zero), tokens, objective, totals),
        token_count=count,
        masked_count=len(tokens.usable) - count,
        ratio_sum=float(torch.where(tokens.usable, term.weight, zero).sum()),
        clipped_count=float((term.clipped & tokens.usable).sum()),
        kl_sum=float((torch.expm1(log_ratio) - log_ratio).sum()),
        entropy_sum=float(-tokens.logprobs.detach().sum()),
        reference_kl_sum=float(reference_kl.sum()),
    )


def _mean(per_token: Tensor, tokens: Tokens, objective: Objective, totals: Totals) -> Tensor:
    """How token losses become the batch's.

    "token" divides by all tokens of the batch (DAPO, 2503.14476), "sample" by the tokens of each sample
    that take part and then by the number of samples (GRPO, 2402.03300), "constant" by a length that no
    sample decides, so that long wrong answers are not favoured (Dr. GRPO, 2503.20783).
    """
    match RECIPES[objective.loss].mean:
        case "token":
            return per_token.sum() / totals.tokens
        case "sample":
            return (tokens.per_sample(per_token) / tokens.lengths).sum() / totals.samples
        case "constant":
            return per_token.sum() / (totals.samples * objective.length_tokens)
