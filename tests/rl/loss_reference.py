"""The losses once more, from the papers' formulas: sample by sample, token by token, in float64, and slow.

Nothing here is shared with `rl.losses` but the names. `held` stands for the present log-probabilities where
a formula stops the gradient, so that finite differences of what remains are its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.losses.recipes import Objective

LIMIT = 20.0


@dataclass(frozen=True)
class Row:
    """One sample; the lists have one entry a loss token."""

    now: list[float]
    sampler: list[float]
    reference: list[float]
    proximal: list[float]
    advantage: float


@dataclass(frozen=True)
class Token:
    """One usable token. `now` is differentiated, `held` is not."""

    now: Tensor
    held: float
    sampler: float
    reference: float
    proximal: float


Sample = tuple[list[Token], float]


def tokens_of(row: Row, now: Sequence[Tensor], held: Sequence[float]) -> Sample:
    every = [Token(*each) for each in zip(now, held, row.sampler, row.reference, row.proximal, strict=True)]
    return [token for token in every if math.isfinite(token.sampler)], row.advantage


def exp(value: Tensor) -> Tensor:
    """e^x, constant beyond the limit."""
    if abs(value.item()) > LIMIT:
        return torch.tensor(math.exp(math.copysign(LIMIT, value.item())), dtype=torch.float64)
    return torch.exp(value)


def surrogate(ratio: Tensor, advantage: float, objective: Objective) -> Tensor:
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    bound = torch.tensor(min(max(ratio.item(), low), high), dtype=torch.float64)
    bounded = ratio if low <= ratio.item() <= high else bound
    return min(ratio * advantage, bounded * advantage, key=Tensor.item)


def truncated(sample: Sample, objective: Objective) -> list[Tensor]:
    tokens, advantage = sample
    return [
        min(math.exp(token.held - token.sampler), objective.ratio_cap) * advantage * token.now
        for token in tokens
    ]


def masked(sample: Sample, objective: Objective) -> list[Tensor]:
    tokens, advantage = sample
    ratios = [math.exp(token.held - token.sampler) for token in tokens]
    kept = [ratio if objective.ratio_floor <= ratio <= objective.ratio_cap else 0.0 for ratio in ratios]
    return [weight * advantage * token.now for weight, token in zip(kept, tokens, strict=True)]


def product(sample: Sample) -> float:
    return math.prod(math.exp(token.held - token.sampler) for token in sample[0])


def sequence_truncated(sample: Sample, objective: Objective) -> list[Tensor]:
    weight = min(product(sample), objective.ratio_cap)
    return [weight * sample[1] * token.now for token in sample[0]]


def sequence_masked(sample: Sample, objective: Objective) -> list[Tensor]:
    ratio = product(sample)
    weight = ratio if objective.ratio_floor <= ratio <= objective.ratio_cap else 0.0
    return [weight * sample[1] * token.now for token in sample[0]]


def cispo(sample: Sample, objective: Objective) -> list[Tensor]:
    tokens, advantage = sample
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    return [
        min(max(math.exp(token.held - token.sampler), low), high) * advantage * token.now for token in tokens
    ]


def clipped(sample: Sample, objective: Objective) -> list[Tensor]:
    tokens, advantage = sample
    return [surrogate(exp(token.now - token.sampler), advantage, objective) for token in tokens]


def gspo(sample: Sample, objective: Objective) -> list[Tensor]:
    """The sample's one term, shared out over its tokens so that their mean is it."""
    tokens, advantage = sample
    if not tokens:
        return []
    ratio = exp(total([token.now - token.sampler for token in tokens]) / len(tokens))
    return [surrogate(ratio, advantage, objective)] * len(tokens)


def decoupled(sample: Sample, objective: Objective) -> list[Tensor]:
    tokens, advantage = sample
    return [
        min(math.exp(token.proximal - token.sampler), objective.ratio_cap)
        * surrogate(exp(token.now - token.proximal), advantage, objective)
        for token in tokens
    ]


def by_token(samples: list[list[Tensor]], drawn: int, objective: Objective) -> Tensor:
    return total([total(sample) for sample in samples]) / drawn


def by_sample(samples: list[list[Tensor]], drawn: int, objective: Objective) -> Tensor:
    return total([total(sample) / len(sample) for sample in samples if sample]) / len(samples)


def by_constant(samples: list[list[Tensor]], drawn: int, objective: Objective) -> Tensor:
    return total([total(sample) / objective.length_tokens for sample in samples]) / len(samples)


def total(values: Sequence[Tensor]) -> Tensor:
    return sum(values, torch.tensor(0.0, dtype=torch.float64))


Policy = Callable[[Sample, Objective], list[Tensor]]
Average = Callable[[list[list[Tensor]], int, Objective], Tensor]
LOSSES: dict[str, tuple[Policy, Average]] = {
    "tis": (truncated, by_token),
    "mis": (masked, by_token),
    "sequence_tis": (sequence_truncated, by_token),
    "sequence_mis": (sequence_masked, by_token),
    "grpo": (clipped, by_sample),
    "dr_grpo": (clipped, by_constant),
    "dapo": (clipped, by_token),
    "gspo": (gspo, by_sample),
    "cispo": (cispo, by_token),
    "decoupled_ppo": (decoupled, by_token),
}


def divergence(token: Token, estimator: str) -> Tensor:
    """Schulman's second and third estimate; constant beyond the limit."""
    log_ratio = token.reference - token.now
    if abs(log_ratio.item()) > LIMIT:
        log_ratio = torch.tensor(math.copysign(LIMIT, log_ratio.item()), dtype=torch.float64)
    return log_ratio**2 / 2 if estimator == "k2" else torch.exp(log_ratio) - 1 - log_ratio


def reference_loss(
    rows: Sequence[Row],
    now: Sequence[Sequence[Tensor]],
    held: Sequence[Sequence[float]],
    objective: Objective,
) -> Tensor:
    """The loss of a batch that consists of these samples."""
    policy, average = LOSSES[objective.loss]
    terms = []
    for row, present, constant in zip(rows, now, held, strict=True):
        sample = tokens_of(row, present, constant)
        gains = policy(sample, objective)
        costs = [objective.kl_coefficient * divergence(token, objective.kl_estimator) for token in sample[0]]
        terms.append([cost - gain for gain, cost in zip(gains, costs, strict=True)])
    return average(terms, sum(len(row.now) for row in rows), objective)
