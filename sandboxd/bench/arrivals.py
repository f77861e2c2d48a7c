"""Callers that come whether or not others were served: as a Poisson process, or more and more of them.

Each acquires a sandbox, runs a command, keeps the sandbox a while and releases it. Its time counts from the
moment at which it was to come, so that a daemon, or a client, that falls behind shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sandboxd.bench import load, plan
from sandboxd.bench.plan import Visit
from sandboxd.bench.result import Result, quantiles
from sandboxd.bench.session import PoolOptions, Target, session
from sandboxd.config import ConfigError

PATIENCE_SECONDS = 60.0
WINDOWS = 10
# More sandboxes than these are not started at once, however far the daemon falls behind.
SIZE_LIMIT = 1000
# Each is remembered with its times.
CALLERS_MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """From `first` to `last` callers a second, for `seconds`: evenly spaced (`shape` ramp), or at random by
    `seed` (poisson). Each keeps its sandbox `hold_seconds`; the pool keeps `warm` ready.
    """

    shape: str
    last: float
    target: Target = field(default_factory=Target)
    first: float = 0.0
    seconds: float = 10.0
    hold_seconds: float = 0.0
    warm: int = 16
    clients: int = 1
    seed: int = 0

    def due(self) -> tuple[float, ...]:
        """When callers come. Raises ConfigError when none does, or more than can be told apart."""
        mean = self.last if self.shape == "poisson" else (self.first + self.last) / 2
        if mean * self.seconds > CALLERS_MOST:
            raise ConfigError(
                f"bench {self.shape}: {mean * self.seconds:.3g} callers are more than {CALLERS_MOST}; lower"
                " the rate or --seconds"
            )
        if self.shape == "poisson":
            moments = plan.poisson(self.last, self.seconds, self.seed)
        else:
            moments = plan.ramp(self.first, self.last, self.seconds)
        if not moments:
            raise ConfigError(
                f"bench {self.shape}: nobody comes in {self.seconds:g} s; raise the rate or --seconds"
            )
        return moments


async def run(options: Options) -> Result:
    """Raises ConfigError, and BackendUnavailable when the daemon cannot be started or reached."""
    due = options.due()
    result = Result(options.shape, options.target.name, len(due))
    # Nobody knows how many will be held at once; a running daemon's pool is taken as it is.
    size = 1 if options.target.address else min(len(due), SIZE_LIMIT)
    warm = 0 if options.target.address else options.warm
    pool = PoolOptions(size, warm=warm, waiting=len(due))
    async with session(options.target, pool, result) as opened:
        visits = plan.Plan(
            opened.client.address,
            opened.pool,
            opened.label,
            due=due,
            hold=options.hold_seconds,
            patience=PATIENCE_SECONDS,
        )
        done, readings = await load.put(opened, visits, options.clients)
    load.note(done, readings, result)
    result.more["arrivals"] = {
        "first_per_s": options.last if options.shape == "poisson" else options.first,
        "last_per_s": options.last,
        "seconds": options.seconds,
        "hold_s": options.hold_seconds,
        "windows": _windows(done.visits, options.seconds),
    }
    return result


def _windows(visits: list[Visit], seconds: float) -> list[dict[str, Any]]:
    """Equal parts of the time. Served in one are those whose command ended in it, whenever they came."""
    length = seconds / WINDOWS
    windows = []
    for number in range(WINDOWS):
        begin, end = number * length, (number + 1) * length
        # The last moment of all is in the last part.
        came = [visit for visit in visits if min(int(visit.due / length), WINDOWS - 1) == number]
        served = sum(visit.done is not None and begin <= visit.done < end for visit in visits)
        windows.append(
            {
                "from_s": begin,
                "to_s": end,
                "offered_per_s": len(came) / length,
                "served_per_s": served / length,
                "failed": sum(bool(visit.failure) for visit in came),
                "ready_s": quantiles([visit.done - visit.due for visit in came if visit.done is not None]),
            }
        )
    return windows
