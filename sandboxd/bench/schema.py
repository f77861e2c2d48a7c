"""The JSON of a measurement, whatever its shape: written by `--json`, read by `bench compare`.

`docs/bench.schema.json` is made of it: `python -m sandboxd.bench.schema > docs/bench.schema.json`. Keys are
only ever added; where one must change its meaning, `VERSION` grows.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

VERSION = 1


class Part(BaseModel):
    """A part of the record; keys that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantiles(Part):
    """Seconds, by nearest rank; `max` is the longest."""

    p50: float
    p90: float
    p99: float
    max: float


class PhaseTimes(Quantiles):
    """Quantiles in seconds, and the mean: means of the phases add up to the mean of the whole."""

    mean: float


class Phases(Part):
    """Where the time of a visit went. `queue` is its wait without a start; `retry` failed attempts and the
    pauses after them; `pull` to `setup` the attempt that succeeded; `exec` the first command.
    """

    queue: PhaseTimes
    retry: PhaseTimes
    pull: PhaseTimes
    create: PhaseTimes
    start: PhaseTimes
    ready: PhaseTimes
    setup: PhaseTimes
    exec: PhaseTimes


class Reading(Part):
    """Pool, host and daemon at one moment, `at` seconds after the load began. `host_cpu` is the busy part of
    all processors, `daemon_cpu` of one.
    """

    at: float
    starting: int
    warm: int
    active: int
    waiting: int
    host_cpu: float
    memory_available_bytes: int
    host_pids: int
    host_fds: int
    daemon_cpu: float | None
    daemon_rss_bytes: int | None
    daemon_fds: int | None
    daemon_threads: int | None


class Readings(Part):
    """Before the load, the peak of each measure (of available memory the least), after it, and in between."""

    before: Reading | None
    peak: Reading | None
    after: Reading | None
    timeline: list[Reading]


class Clients(Part):
    """The client processes: processor time of each and of the daemon while the load lasted, as parts of one
    processor; whether they were what limited it; and that in words.
    """

    count: int
    cpu_shares: list[float]
    daemon_cpu_share: float | None
    limited: bool
    verdict: str


class Window(Part):
    """Of a ramp or of Poisson arrivals: those that were to begin between `from_s` and `to_s`."""

    from_s: float
    to_s: float
    offered_per_s: float
    served_per_s: float
    failed: int
    ready_s: Quantiles | None


class Arrivals(Part):
    """What was offered: at how many a second, for how long, and what came of it as time went on."""

    first_per_s: float
    last_per_s: float
    seconds: float
    hold_s: float
    windows: list[Window]


class Term(Part):
    """One term of `--slo`: what was measured, and whether that is within it."""

    term: str
    measured: float | None
    met: bool


class Health(Part):
    """How the health service was asked meanwhile. `late_s` is how late the asking process was run itself."""

    interval_s: float
    asked: int
    failed: int
    late_s: Quantiles | None


class AtOnce(Part):
    """Commands of many callers at once."""

    callers: int
    wall_s: float
    rate_per_s: float


class WarmLevel(Part):
    """Warm sandboxes while the load lasted."""

    target: int
    mean: float | None
    least: int | None


class Idle(Part):
    """What a sandbox takes that is held and does nothing, all its processes: mean and most of the `sandboxes`
    that were looked at for `seconds`; memory as proportional set size, processor time as a part of one.
    """

    sandboxes: int
    seconds: float
    pss_bytes: float
    most_pss_bytes: int
    cpu_share: float
    most_cpu_share: float


class Record(Part):
    """One measurement. What its shape does not measure is null."""

    version: Annotated[int, Field(ge=1, le=VERSION)] = VERSION
    shape: str
    backend: str
    count: int
    failed: int
    wall_s: float
    ready_s: Quantiles | None = None
    acquire_s: Quantiles | None = None
    exec_s: Quantiles | None = None
    release_s: Quantiles | None = None
    exec_at_once_s: Quantiles | None = None
    exec_beside_bombs_s: Quantiles | None = None
    rollout_s: Quantiles | None = None
    exec_off_s: Quantiles | None = None
    exec_on_s: Quantiles | None = None
    fill_s: Quantiles | None = None
    health_s: Quantiles | None = None
    late_s: Quantiles | None = None
    rate_per_s: float | None = None
    success_rate: float | None = None
    retries: int | None = None
    alive_after_hold: int | None = None
    leaked: dict[str, int] | None = None
    host: dict[str, Any] = {}
    warm: bool | None = None
    hold_s: float | None = None
    idle: Idle | None = None
    no_exec: bool | None = None
    callers: int | None = None
    warm_level: WarmLevel | None = None
    phases: Phases | None = None
    curves: dict[str, list[tuple[float, float]]] = {}
    ready_over_time: list[tuple[float, int]] | None = None
    readings: Readings | None = None
    clients: Clients | None = None
    health: Health | None = None
    arrivals: Arrivals | None = None
    at_once: AtOnce | None = None
    output: dict[str, float | None] | None = None
    soak: dict[str, Any] | None = None
    bombs: dict[str, Any] | None = None
    fork: dict[str, float] | None = None
    telemetry: dict[str, float] | None = None
    starts: dict[str, Any] | None = None
    chaos: dict[str, Any] | None = None
    sweep: list[Record] | None = None
    slo: list[Term] | None = None
    baseline: Record | None = None
    failures: list[str] = []


def json_schema() -> dict[str, Any]:
    """As JSON Schema, draft 2020-12."""
    schema = Record.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=1) + "\n")
