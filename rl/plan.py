"""How long a run trains and on how much at a time, and what its loop is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from rl.advantage import DEFAULT_RULE, AdvantageRule
from rl.buffer import GroupBuffer
from rl.curriculum import Curriculum
from rl.group_play import GroupRules
from rl.metrics import Row
from rl.player import Player
from rl.trainer_process import Trainer
from rl.weights import Publisher


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train and on how much at a time; `deadline` on the loop's clock, None for no limit.

    `replace_silent`: groups without a signal are replaced by others; otherwise they take their place
    in the batch and train nothing, as in a plain loop. `advantages`: how their rewards are compared.
    `spare_samples` and `min_samples` are as in `GroupRules`.
    """

    steps: int
    groups_per_batch: int
    samples_per_group: int
    replace_silent: bool = True
    deadline: float | None = None
    advantages: AdvantageRule = DEFAULT_RULE
    spare_samples: int = 0
    min_samples: int = 2

    @property
    def group_rules(self) -> GroupRules:
        """How one group is played."""
        return GroupRules(self.samples_per_group, self.spare_samples, self.min_samples)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop is made of. `on_step` receives each step's row when its weights are live."""

    curriculum: Curriculum
    player: Player
    buffer: GroupBuffer
    trainer: Trainer
    publisher: Publisher
    on_step: Callable[[Row], Coroutine[None, None, None]]
    clock: Callable[[], float] = time.monotonic
