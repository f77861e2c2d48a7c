"""Settings of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How one optimiser step is taken."""

    learning_rate: float = 1e-5
    warmup_steps: int = 2
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ratio_cap: float = 2.0
    max_pass_tokens: int = 2048
    threads: int = 0
