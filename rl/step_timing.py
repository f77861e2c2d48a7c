"""Where the time of a step goes, to waiting, training and publishing; and whether one more step fits."""

from __future__ import annotations

from collections import deque

from rl.checkpoint import LoopState
from rl.metrics import Row, wait_ratio

RECENT_STEPS = 4
"""The first steps of a run are the longest; by the longest of what followed it is judged how long it takes
to train one more batch."""


class StepTiming:
    """Of one run, in seconds."""

    def __init__(self, resumed: LoopState | None) -> None:
        self.waiting_seconds = resumed.waiting_seconds if resumed else 0.0
        self.training_seconds = resumed.training_seconds if resumed else 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    @property
    def wait_ratio(self) -> float:
        """Of all steps so far."""
        return wait_ratio(self.waiting_seconds, self.training_seconds)

    def patience(self, deadline: float | None, now: float) -> float | None:
        """How long a batch may still take so that it can be trained and live by then; None for ever."""
        return None if deadline is None else deadline - max(self._recent, default=0.0) - now

    def step(self, began: float, ready: float, trained: float, live: float) -> Row:
        """`began` waiting, batch `ready`, `trained`, weights `live`: all on the loop's clock."""
        waiting, training = (ready - began) + (live - trained), trained - ready
        self.waiting_seconds += waiting
        self.training_seconds += training
        self._recent.append(live - ready)
        return {
            "time/step": live - began,
            "time/wait_for_batch": ready - began,
            "time/train": training,
            "time/publish": live - trained,
            "perf/wait_time_ratio": wait_ratio(waiting, training),
        }
