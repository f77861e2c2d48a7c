"""What the host, the daemon and its pool were like before a load, at its peak and after it.

Looked at a few times a second by the bench's own process, which makes no calls of the load itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandboxd.bench.processes import Usage
from sandboxd.types import PoolStats

INTERVAL_SECONDS = 0.25
# So long the host is looked at before the load, for its share of busy processors.
BEFORE_SECONDS = 0.25
# The kernel counts in hundredths: over less than this a share would be a guess.
SHORTEST_SECONDS = 0.1
# More points than this are thinned out: a plot is not wider.
POINTS = 240


@dataclass(frozen=True, slots=True)
class Reading:
    """The state at one moment, `at` by the monotonic clock.

    `host_cpu` is the part of all processors that were busy since the reading before, `daemon_cpu` how many of
    them the daemon had. What cannot be read here is None: the daemon may run elsewhere.
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
    daemon_cpu: float | None = None
    daemon_rss_bytes: int | None = None
    daemon_fds: int | None = None
    daemon_threads: int | None = None


@dataclass(slots=True)
class _Ticks:
    """Counters of which the difference is what counts."""

    at: float
    busy: int
    all: int
    daemon: float | None


@dataclass(slots=True)
class Readings:
    """Of one load, which begins at `begin` (monotonic). `before` is there after `prepare`, `after` after
    `finish`.
    """

    stats: Callable[[], Awaitable[PoolStats]]
    daemon: int | None
    taken: list[Reading] = field(default_factory=list)
    before: Reading | None = None
    after: Reading | None = None
    begin: float = 0.0
    failed_starts: list[int] = field(default_factory=list)
    """The pool's total at each reading."""
    _last: _Ticks | None = None
    _busy: tuple[float, float | None] = (0.0, None)

    async def prepare(self) -> None:
        """Looks at the host while nothing is asked of it yet."""
        self._last = _ticks(self.daemon)
        await asyncio.sleep(BEFORE_SECONDS)
        self.before = await self._read()

    @contextlib.asynccontextmanager
    async def taken_meanwhile(self) -> AsyncIterator[None]:
        """While the block runs, several times a second."""

        async def take() -> None:
            while True:
                self.taken.append(await self._read())
                await asyncio.sleep(INTERVAL_SECONDS)

        taking = asyncio.create_task(take())
        try:
            yield
        finally:
            taking.cancel()
            await asyncio.wait([taking])
        self.taken.append(await self._read())

    async def finish(self) -> None:
        """Looks at the host after the load."""
        self._last = _ticks(self.daemon)
        await asyncio.sleep(BEFORE_SECONDS)
        self.after = await self._read()

    async def _read(self) -> Reading:
        stats = await self.stats()
        self.failed_starts.append(stats.start_failures_total)
        now = _ticks(self.daemon)
        if self._last is not None and now.at - self._last.at >= SHORTEST_SECONDS:
            self._busy = _busy(self._last, now)
            self._last = now
        usage = _usage(self.daemon)
        return Reading(
            at=now.at,
            starting=stats.starting,
            warm=stats.warm,
            active=stats.active,
            waiting=stats.waiting,
            host_cpu=self._busy[0],
            memory_available_bytes=_memory_available(),
            host_pids=_pids(),
            host_fds=_fds(),
            daemon_cpu=self._busy[1],
            daemon_rss_bytes=usage.rss_bytes if usage else None,
            daemon_fds=usage.fds if usage else None,
            daemon_threads=usage.threads if usage else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Before, at the peak of each measure by itself, and after; and all of them, thinned out."""
        return {
            "before": self.before and self._told(self.before),
            "peak": self._peak(),
            "after": self.after and self._told(self.after),
            "timeline": [self._told(one) for one in thinned(self._since_begin())],
        }

    def _since_begin(self) -> list[Reading]:
        return [reading for reading in self.taken if reading.at >= self.begin]

    def _told(self, reading: Reading) -> dict[str, Any]:
        """With its moment counted from the begin of the load."""
        return {**asdict(reading), "at": reading.at - self.begin}

    def _peak(self) -> dict[str, Any] | None:
        if not self.taken:
            return None
        peak: dict[str, Any] = {}
        for name in asdict(self.taken[0]):
            values = [value for each in self.taken if (value := getattr(each, name)) is not None]
            lowest = name == "memory_available_bytes"
            peak[name] = None if not values else min(values) if lowest else max(values)
        return {**peak, "at": peak["at"] - self.begin}


def thinned(items: list[Any], limit: int = POINTS) -> list[Any]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(items) <= limit:
        return items
    return [items[round(number * (len(items) - 1) / (limit - 1))] for number in range(limit)]


def _usage(pid: int | None) -> Usage | None:
    """None where the daemon cannot be looked at, or has ended."""
    if pid is None:
        return None
    with contextlib.suppress(OSError, KeyError):
        return Usage.of(pid)
    return None


def _ticks(daemon: int | None) -> _Ticks:
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    # Idle, and waiting for a disk: nobody's work.
    idle = fields[3] + fields[4]
    usage = _usage(daemon)
    return _Ticks(time.monotonic(), sum(fields) - idle, sum(fields), usage.cpu_seconds if usage else None)


def _busy(last: _Ticks, now: _Ticks) -> tuple[float, float | None]:
    """The host's part of all processors, and the daemon's share of one."""
    host = (now.busy - last.busy) / max(1, now.all - last.all)
    if last.daemon is None or now.daemon is None:
        return host, None
    return host, (now.daemon - last.daemon) / (now.at - last.at)


def _memory_available() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _pids() -> int:
    """Processes and threads: each takes one."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def _fds() -> int:
    return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])


def processors() -> int:
    """How many this host has."""
    return os.cpu_count() or 1
