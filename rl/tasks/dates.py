"""Questions about calendar dates, written as year-month-day."""

from __future__ import annotations

import random
from datetime import date, timedelta

from rl.tasks.base import Problem, Textual


class Dates(Textual):
    """`How many days are there from 2021-03-04 to 2021-05-01?`; the level decides the question."""

    name = "dates"
    levels = ("days between, one month", "days between, some years", "date after some days", "weekday")

    def make(self, level: int, rng: random.Random) -> Problem:
        start = date(2000, 1, 1) + timedelta(days=rng.randrange(9000))
        if level == 3:
            return Problem(f"Which day of the week is {start}?", f"{start:%A}")
        days = rng.randint(2, 25) if level == 0 else rng.randint(30, 800)
        if level == 0:
            start = start.replace(day=1 + rng.randrange(3))
        end = start + timedelta(days=days)
        if level == 2:
            return Problem(f"Which date is {days} days after {start}?", str(end))
        return Problem(f"How many days are there from {start} to {end}?", str(days))
