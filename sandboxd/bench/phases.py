"""Where the time of a visit went, from the moment at which it was to begin to its first command's end."""

from __future__ import annotations

from typing import Any

from sandboxd.bench.plan import Visit
from sandboxd.bench.result import quantiles

# In order. `queue` is all of the wait in which the sandbox that came was not being started, and `exec` the
# first command; those between are the daemon's own account of the start.
START_PHASES = ("retry", "pull", "create", "start", "ready", "setup")
PHASES = ("queue", *START_PHASES, "exec")


def of(visit: Visit) -> dict[str, float]:
    """Seconds by phase, which add up to the whole. Empty for a visit that was not served.

    A sandbox may have begun to start before it was asked for: only what the visit waited for counts.
    """
    if visit.acquired is None or visit.done is None:
        return {}
    waited = visit.acquired - visit.due
    parts = [(name, visit.parts.get(name, 0.0)) for name in START_PHASES]
    started = sum(seconds for _, seconds in parts)
    # The start ended so long before the lease began.
    ready_for = max(0.0, (visit.age or started) - started)
    earlier = max(0.0, started - max(0.0, waited - ready_for))
    found = {}
    for name, seconds in parts:
        dropped = min(seconds, earlier)
        earlier -= dropped
        found[name] = seconds - dropped
    return {"queue": waited - sum(found.values()), **found, "exec": visit.done - visit.acquired}


def summary(visits: list[Visit]) -> dict[str, Any] | None:
    """Of each phase the quantiles, and the mean, which can be added up; None where nothing was served."""
    found = [parts for visit in visits if (parts := of(visit))]
    if not found:
        return None
    summed = {}
    for name in PHASES:
        values = [parts[name] for parts in found]
        summed[name] = {**(quantiles(values) or {}), "mean": sum(values) / len(values)}
    return summed
