"""What a client process of a load is told to do, and what it tells of each visit. Pure; times in seconds."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Plan:
    """Visits to make: acquire a sandbox, run a command in it, release it.

    Open loop: a visit begins at each of the moments `due`, counted from the begin of the load, whether or not
    earlier ones have ended. Closed loop: `callers` make one after the other for `seconds`. `hold` is how long
    a visit keeps its sandbox before it looks whether that is still alive; None keeps it until the load is
    over. A visit waits up to `patience` for its sandbox, which carries `label`; with `execute` False it is
    served when it has it, and no command runs.
    """

    address: str
    pool: str
    label: str
    due: tuple[float, ...] = ()
    callers: int = 0
    seconds: float = 0.0
    hold: float | None = 0.0
    patience: float = 600.0
    execute: bool = True

    def shares(self, clients: int) -> list[Plan]:
        """One for each of so many processes: every moment and caller in exactly one of them."""
        return [
            replace(
                self,
                due=self.due[number::clients],
                callers=self.callers // clients + (number < self.callers % clients),
            )
            for number in range(clients)
        ]

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Plan:
        """Of what `to_line` wrote."""
        told = json.loads(line)
        return cls(**{**told, "due": tuple(told["due"])})


@dataclass(slots=True)
class Visit:
    """One visit. Moments are counted from the begin of the load; None where it did not come so far.

    `due` is when it was to begin and `sent` when it did, `done` when its first command had ended well (where
    none runs a command, when it had its sandbox), and `alive` whether a second one did. `failure` is why it
    went no further. Of its sandbox: `age` is how long before its lease its start was decided, and `parts`
    what the daemon tells of that start, by phase.
    """

    due: float
    sent: float
    acquired: float | None = None
    done: float | None = None
    released: float | None = None
    alive: bool | None = None
    failure: str = ""
    age: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    def to_row(self) -> tuple[Any, ...]:
        """For JSON: half as long as an object."""
        return astuple(self)


def burst(count: int) -> tuple[float, ...]:
    """All at once."""
    return (0.0,) * count


def poisson(rate: float, seconds: float, seed: int) -> tuple[float, ...]:
    """Moments of a Poisson process of so many a second."""
    draw = random.Random(seed)
    moments: list[float] = []
    now = draw.expovariate(rate)
    while now < seconds:
        moments.append(now)
        now += draw.expovariate(rate)
    return tuple(moments)


def ramp(first: float, last: float, seconds: float) -> tuple[float, ...]:
    """Moments whose rate grows evenly from `first` to `last` a second."""
    moments: list[float] = []
    slope = (last - first) / seconds
    for number in range(1, int((first + last) / 2 * seconds) + 1):
        # The moment t at which first·t + slope·t²/2 have come.
        root = first * first + 2 * slope * number
        moment = number / first if slope == 0 else (max(0.0, root) ** 0.5 - first) / slope
        moments.append(min(moment, seconds))
    return tuple(moments)
