"""Whether a pool can start sandboxes at all, told once when it changes, and how it goes on when it cannot.

Pure but for the log. The ledger decides: a pool is DEGRADED from a start that failed for good until the
next that succeeds. Meanwhile one start at a time shows whether that has changed, for a caller that waits
or, by itself, after pauses that double: a broken template makes no storm.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

PAUSE_FIRST, PAUSE_LAST = 1.0, 60.0


@dataclass(slots=True)
class Health:
    """Of the pool `name`. `reason` is what the last failed start said, empty since the last success."""

    name: str
    reason: str = ""
    fills_at: float = 0.0
    _since: float | None = field(init=False, default=None)
    _failures: int = field(init=False, default=0)
    _pause: float = field(init=False, default=0.0)

    def may_fill(self, now: float) -> bool:
        """Whether a start may be made for nobody but the pool."""
        return now >= self.fills_at

    def failed(self, now: float, reason: str, log: str = "") -> None:
        """A start failed for good; `log` holds the sandbox's last lines, if there are any."""
        self.reason = reason
        self._failures += 1
        lines = f"; its last lines: {log}" if log else ""
        if self._since is None:
            self._since = now
            logger.error("pool %s is DEGRADED: %s%s", self.name, reason, lines)
        else:
            # The same again, perhaps a hundred times.
            logger.debug("pool %s is still DEGRADED: %s%s", self.name, reason, lines)
        # Those that were under way when the pause began do not make it longer.
        if self.may_fill(now):
            self._pause = min(max(PAUSE_FIRST, 2 * self._pause), PAUSE_LAST)
            self.fills_at = now + self._pause

    def fork_failed(self, source: str, reason: str) -> None:
        """Says nothing about the template: the pool goes on as before."""
        self.reason = reason
        logger.error("pool %s: forking %s: %s", self.name, source, reason)

    def succeeded(self, now: float) -> None:
        """A sandbox was started."""
        if self._since is not None:
            logger.warning(
                "pool %s is OK again after %.1f s and %d failed starts",
                self.name,
                now - self._since,
                self._failures,
            )
        self.reason, self._since, self._failures = "", None, 0
        self._pause = self.fills_at = 0.0
