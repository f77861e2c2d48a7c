"""What each loss is, as data: its mean, the numbers that it reads and their defaults. No torch here.

The settings choose a loss by name; `rl.losses.total` has the function of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LossName = Literal[
    "tis",
    "mis",
    "sequence_tis",
    "sequence_mis",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "decoupled_ppo",
]
KlName = Literal["k2", "k3"]
Mean = Literal["token", "sample", "constant"]

DEFAULT_RATIO_CAP = 2.0
DEFAULT_LENGTH_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """One loss. `dials` are the numbers that it reads, each with the value that it has when unset.

    `mean` is how token losses become the batch's: "token" over all tokens, "sample" over the tokens of
    each sample and then over samples, "constant" a sum over tokens divided by a fixed length and the
    number of samples. `by_deviation`: advantages are divided by the deviation of the group's rewards.
    """

    mean: Mean
    dials: Mapping[str, float] = field(default_factory=dict)
    by_deviation: bool = True


_CAP = {"ratio_cap": DEFAULT_RATIO_CAP}
_PPO = {"clip_low": 0.2, "clip_high": 0.2}

RECIPES: dict[LossName, Recipe] = {
    "tis": Recipe("token", _CAP),
    "mis": Recipe("token", {**_CAP, "ratio_floor": 0.5}),
    "sequence_tis": Recipe("token", _CAP),
    # A product over hundreds of tokens is below any useful floor for most samples.
    "sequence_mis": Recipe("token", {**_CAP, "ratio_floor": 0.0}),
    "grpo": Recipe("sample", _PPO),
    "dr_grpo": Recipe("constant", {**_PPO, "length_tokens": DEFAULT_LENGTH_TOKENS}, by_deviation=False),
    "dapo": Recipe("token", {"clip_low": 0.2, "clip_high": 0.28}),
    "gspo": Recipe("sample", {"clip_low": 3e-4, "clip_high": 4e-4}),
    # No lower bound, as in the paper, which leaves the upper one to be tuned: weights up to 5 are common.
    "cispo": Recipe("token", {"clip_low": 1.0, "clip_high": 4.0}),
    "decoupled_ppo": Recipe("token", {**_PPO, **_CAP}),
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss with its numbers; those that it does not read are ignored.

    Ratios, clips and the coefficient have no unit; `length_tokens` is in tokens.
    """

    loss: LossName = "tis"
    ratio_cap: float = DEFAULT_RATIO_CAP
    ratio_floor: float = 0.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    length_tokens: int = DEFAULT_LENGTH_TOKENS
    kl_coefficient: float = 0.0
    kl_estimator: KlName = "k3"


@dataclass(frozen=True, slots=True)
class Totals:
    """What a whole batch divides its sums by: sampled tokens, also those whose log-probability is missing,
    and samples. A pass computes its share of the batch's loss with them."""

    tokens: int
    samples: int
