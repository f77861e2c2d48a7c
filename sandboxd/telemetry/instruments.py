"""What is measured of the pools: each instrument by name, with its unit and what it says. The documentation,
the dashboard and the alert rules are held to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from sandboxd.telemetry.counting import BOUNDS
from sandboxd.telemetry.lag import LOOP_LAG
from sandboxd.telemetry.recorder import ACQUIRE_WAIT, ATTEMPT_FAILURES, START_DURATION, Attributes
from sandboxd.telemetry.snapshot import Numbers
from sandboxd.types import PoolState, PoolStats

Values = Iterable[tuple[float, dict[str, str]]]

HISTOGRAMS = {
    START_DURATION: "Time from the decision to start a sandbox until it is ready or given up, by outcome.",
    ACQUIRE_WAIT: "Time that a caller waited for its sandboxes, by outcome.",
    LOOP_LAG: "How late the daemon's event loop came to what was due, ten times a second.",
}
COUNTERS = {ATTEMPT_FAILURES: ("{attempt}", "Attempts to start a sandbox that failed, by phase.")}


@dataclass(frozen=True, slots=True)
class Observed:
    """An instrument that is read from a pool's numbers whenever metrics are collected."""

    name: str
    unit: str
    description: str
    values: Callable[[PoolStats], Values]
    total: bool = False


def _states(stats: PoolStats) -> Values:
    for state in ("starting", "warm", "active", "deleting", "quarantined"):
        yield getattr(stats, state), {"sandboxd.sandbox.state": state}


def _endings(stats: PoolStats) -> Values:
    yield stats.released_total, {"sandboxd.lease.ending": "released"}
    yield stats.expired_total, {"sandboxd.lease.ending": "expired"}
    yield stats.lost_total, {"sandboxd.lease.ending": "lost"}


def _outcomes(stats: PoolStats) -> Values:
    yield stats.started_total, {"sandboxd.outcome": "ready"}
    yield stats.start_failures_total, {"sandboxd.outcome": "failed"}


def _pool_states(stats: PoolStats) -> Values:
    for state in PoolState:
        yield int(stats.state is state), {"sandboxd.pool.state": state.value}


def _one(read: Callable[[PoolStats], float | None]) -> Callable[[PoolStats], Values]:
    def values(stats: PoolStats) -> Values:
        value = read(stats)
        return () if value is None else ((value, {}),)

    return values


OBSERVED = (
    Observed("sandboxd.pool.sandboxes", "{sandbox}", "Sandboxes of a pool, by state.", _states),
    Observed("sandboxd.pool.waiting", "{caller}", "Callers that wait.", _one(lambda s: s.waiting)),
    Observed(
        "sandboxd.pool.oldest_wait",
        "s",
        "How long the caller that waits longest has waited; 0 where none waits.",
        _one(lambda s: s.oldest_wait_seconds or 0.0),
    ),
    Observed("sandboxd.pool.warm_target", "{sandbox}", "Kept ready now.", _one(lambda s: s.warm_target)),
    Observed("sandboxd.pool.size_limit", "{sandbox}", "May exist at once.", _one(lambda s: s.size_limit)),
    Observed("sandboxd.pool.start_limit", "{sandbox}", "May be starting.", _one(lambda s: s.start_limit)),
    Observed("sandboxd.pool.state", "1", "1 for the state that the pool is in, else 0.", _pool_states),
    Observed(
        "sandboxd.leases.granted", "{lease}", "Leases given.", _one(lambda s: s.acquired_total), total=True
    ),
    Observed("sandboxd.leases.ended", "{lease}", "Leases ended, by how.", _endings, total=True),
    Observed("sandboxd.starts", "{sandbox}", "Starts that ended, by outcome.", _outcomes, total=True),
    Observed(
        "sandboxd.unhealthy",
        "{sandbox}",
        "Warm sandboxes that died or did not answer.",
        _one(lambda s: s.unhealthy_total),
        total=True,
    ),
    Observed(
        "sandboxd.reused",
        "{sandbox}",
        "Used sandboxes made as new.",
        _one(lambda s: s.reused_total),
        total=True,
    ),
)


class Instruments:
    """Of one daemon; `numbers` are its pools'."""

    def __init__(self, meter: Meter, numbers: Callable[[], Numbers]) -> None:
        self._histograms = {
            name: meter.create_histogram(name, "s", about, explicit_bucket_boundaries_advisory=list(BOUNDS))
            for name, about in HISTOGRAMS.items()
        }
        self._counters = {
            name: meter.create_counter(name, unit, about) for name, (unit, about) in COUNTERS.items()
        }
        for each in OBSERVED:
            make = meter.create_observable_counter if each.total else meter.create_observable_gauge
            make(each.name, [_callback(each, numbers)], each.unit, each.description)

    def seconds(self, name: str, value: float, attributes: Attributes) -> None:
        """As `Recorder.seconds`, of HISTOGRAMS."""
        self._histograms[name].record(value, dict(attributes))

    def count(self, name: str, attributes: Attributes) -> None:
        """As `Recorder.count`, of COUNTERS."""
        self._counters[name].add(1, dict(attributes))


def _callback(
    each: Observed, numbers: Callable[[], Numbers]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for pool, stats in numbers().items():
            for value, attributes in each.values(stats):
                yield Observation(value, {"sandboxd.pool": pool, **attributes})

    return observe
