"""Queue policies: what enters the queue before the trainer, in which order it leaves, what is given up.

| name | trains | waits for | gives up |
|---|---|---|---|
| `in_order` | groups as they were admitted | the oldest, however long it takes | nothing |
| `windowed` | the oldest finished ones | those that would be too old after the step | spare groups alone |
| `drop_late` | the oldest finished ones | nobody in particular | whatever is late |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl.policies.drop_late import DropLate
from rl.policies.in_order import InOrder
from rl.policies.windowed import Windowed
from rl.staleness import QueuePolicy, Slots

__all__ = ["DropLate", "InOrder", "PolicyName", "QueueRules", "Windowed", "build_policy"]

PolicyName = Literal["in_order", "windowed", "drop_late"]


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How a queue is kept. `spare_groups` are started beyond the slots; `min_samples` is the fewest scored
    attempts of a group that may be trained."""

    policy: PolicyName = "windowed"
    spare_groups: int = 0
    min_samples: int = 2


def build_policy(rules: QueueRules, bound: int, groups_per_batch: int) -> QueuePolicy:
    """The policy of that name."""
    slots = Slots(bound, groups_per_batch, rules.spare_groups)
    match rules.policy:
        case "in_order":
            return InOrder(slots)
        case "windowed":
            return Windowed(slots)
        case "drop_late":
            return DropLate(slots, rules.min_samples)
