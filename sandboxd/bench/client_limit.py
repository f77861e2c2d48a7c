"""Whether what was measured is the daemon, or the clients that asked it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from sandboxd.bench.processes import cpu_seconds
from sandboxd.bench.readings import processors

# Of one processor: an event loop that has so much of it is never idle when it is needed.
BUSY_SHARE = 0.85
# Of all processors of the host.
FULL_SHARE = 0.95


@dataclass(slots=True)
class Shares:
    """Of one processor each, while the load lasted: every client process, and the daemon where it can be
    looked at.
    """

    clients: list[float] = field(default_factory=list)
    daemon: float | None = None
    _pid: int | None = None
    _before: float | None = None

    def begin(self, daemon_pid: int | None) -> None:
        """Notes what the daemon has used before."""
        self._pid = daemon_pid
        self._before = _used(daemon_pid)

    def end(self, client_seconds: list[float], begin: float) -> None:
        """The clients have used so much since `begin` (monotonic)."""
        seconds = max(1e-3, time.monotonic() - begin)
        self.clients = [used / seconds for used in client_seconds]
        now = _used(self._pid)
        if now is not None and self._before is not None:
            self.daemon = (now - self._before) / seconds

    @property
    def limited(self) -> bool:
        """Whether a client had no time left while the daemon had."""
        most = max(self.clients, default=0.0)
        return most >= BUSY_SHARE and (self.daemon is None or most >= self.daemon)

    def verdict(self, cpus: int) -> str:
        """One sentence for the reader; `cpus` is how many processors the host has."""
        most, total = max(self.clients, default=0.0), sum(self.clients)
        ours = f"the busiest client process had {most:.0%} of a processor"
        daemon = "the daemon's share is not known" if self.daemon is None else f"the daemon {self.daemon:.0%}"
        if self.limited:
            more = len(self.clients) + 1
            return f"the client was the limit: {ours}, {daemon}; use --clients {more}"
        if self.daemon is not None and total + self.daemon >= FULL_SHARE * cpus and total > self.daemon:
            return (
                f"the host was full, of clients more than of the daemon: {ours}, all of them {total:.0%},"
                f" {daemon}; run the bench on another host, with --address"
            )
        return f"the client was not the limit: {ours}, {daemon}"

    def to_json(self) -> dict[str, Any]:
        return {
            "count": len(self.clients),
            "cpu_shares": self.clients,
            "daemon_cpu_share": self.daemon,
            "limited": self.limited,
            "verdict": self.verdict(processors()),
        }


def _used(pid: int | None) -> float | None:
    if pid is None:
        return None
    with contextlib.suppress(OSError):
        return cpu_seconds(pid)
    return None
