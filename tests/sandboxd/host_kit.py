"""Simulated hosts: how fast they start sandboxes depends on how many start at once."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from sandboxd.pacing import Attempt, Pace

CAPACITY = Callable[[int, float], float]
"""Sandboxes a second that a host has ready while so many start at once, at this time in seconds."""


@dataclass(slots=True)
class Host:
    """Processor sharing: the starts under way share the capacity equally; each needs gamma-distributed work
    with mean 1 and a coefficient of variation of `1/sqrt(shape)`. More than `fails_above` at once: a new
    one fails. One in `1/hang_rate` does nothing and fails `hang_seconds` later.
    """

    capacity: CAPACITY
    fails_above: int = 10**6
    fail_rate: float = 0.0
    hang_rate: float = 0.0
    hang_seconds: float = 0.0
    shape: float = 4.0
    seed: int = 1

    def run(self, pace: Pace, count: int, *, since: int = 0) -> float:
        """Starts until `count` have succeeded, as many at once as `pace` allows; returns successes a second,
        those before the `since`-th left out.
        """
        draw = random.Random(self.seed)
        now, done, work, begun = 0.0, 0, 0.0, 0.0
        order = itertools.count()
        # Those that work end when so much work was done for each, those that hang at a time.
        working: list[tuple[float, int, Attempt, bool]] = []
        hanging: list[tuple[float, int, Attempt]] = []
        while done < count:
            while pace.free(len(working) + len(hanging)) > 0:
                fails = len(working) >= self.fails_above or draw.random() < self.fail_rate
                needs = draw.gammavariate(self.shape, 1 / self.shape)
                if self.hang_rate and draw.random() < self.hang_rate:
                    heapq.heappush(hanging, (now + self.hang_seconds, next(order), pace.begin(now)))
                else:
                    heapq.heappush(working, (work + needs, next(order), pace.begin(now), not fails))
            share = self.capacity(len(working), now) / len(working) if working else 0.0
            ready_at = now + (working[0][0] - work) / share if working else math.inf
            overdue_at = pace.overdue_at(now) or math.inf
            if overdue_at < min(ready_at, hanging[0][0] if hanging else math.inf):
                now, work = overdue_at, work + (overdue_at - now) * share
                pace.overdue_at(now)
                continue
            if hanging and hanging[0][0] < ready_at:
                ends, _, attempt = heapq.heappop(hanging)
                now, work, ok = ends, work + (ends - now) * share, False
            else:
                ends, _, attempt, ok = heapq.heappop(working)
                now, work = ready_at, ends
            pace.end(attempt, now, ok=ok)
            done += ok
            if done == since:
                begun = now
        return (count - since) / (now - begun)


def processors(cores: int, each: float = 1.0) -> CAPACITY:
    """Starts that do nothing but compute, `each` seconds long when alone."""
    return lambda at_once, _: min(at_once, cores) / each


def engine(at_once: int, now: float) -> float:
    """As the Docker Engine on two cores: best at 3, worse beyond (measured 8.4, 5.1, 4.8, 4.8, 5.0 s for 48
    at 1, 2, 4, 8, 16 at once), here with a steeper fall.
    """
    return {1: 5.7, 2: 9.4, 3: 10.0, 4: 10.0}.get(at_once, 10.0 * float((4 / at_once) ** 0.6))


def waiting(at_once: int, now: float) -> float:
    """Starts that mostly wait: what one more brings shrinks slowly (Amdahl's law with 3 % in series)."""
    return at_once / (1 + 0.03 * (at_once - 1))
