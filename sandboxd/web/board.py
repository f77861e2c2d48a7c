"""What all pages are told from: the pools as they are now, their history, and the training runs.

Looked at only while a page is open, and then once for all pages; the history alone is kept always. A page
is told what differs from what it was told last. So one that reads slowly, or not at all, costs nothing that
grows: it hears the newest when it reads again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable

from sandboxd import __version__, run_digest
from sandboxd.overview import Row, Rows, Sections
from sandboxd.pools import Pools
from sandboxd.runs import Run
from sandboxd.web import view
from sandboxd.web.history import INTERVAL_SECONDS, History

# Some of what is shown changes without any event: rates, and how long somebody has waited.
STALE_SECONDS = 0.5

LOOKS: dict[str, Callable[[Pools], Rows]] = {
    "pools": view.pools_rows,
    "tenants": view.tenants_rows,
    "leases": view.leases_rows,
    "failures": view.failures_rows,
}


class Board:
    """Of one daemon. `actions` says whether pages may change something."""

    def __init__(self, pools: Pools, runs: Iterable[Run] = (), *, actions: bool = False) -> None:
        self.pools = pools
        self.history = History()
        self.actions = actions
        self.boot = uuid.uuid4().hex
        self._runs = list(runs)
        self._looked_at: float | None = None
        self._rows: Sections = {}

    def changed(self) -> None:
        """What was seen does not hold any more."""
        self._looked_at = None

    def rows(self) -> Sections:
        """By section and key; the same objects until something has changed."""
        now = self.pools.clock.now()
        if self._looked_at is None or now - self._looked_at > STALE_SECONDS:
            self._rows = {section: look(self.pools) for section, look in LOOKS.items()}
            self._rows["runs"] = {run.name: _run_row(run) for run in self._runs}
            self._rows["steps"] = {key: row for run in self._runs for key, row in run.steps.items()}
            self._looked_at = now
        return self._rows

    async def keep(self) -> None:
        """Adds to the history and follows the runs, for ever."""
        while True:
            self.history.add(
                self.pools.clock.wall(), {name: pool.stats() for name, pool in self.pools.by_name.items()}
            )
            for run in self._runs:
                if await run.look():
                    self.changed()
            await self.pools.clock.sleep(INTERVAL_SECONDS)


def _run_row(run: Run) -> Row:
    """Beside its steps, which the page has itself: what they come to, in words."""
    head = run.head()
    told = {key: head[key] for key in ("fault", "step", "families")}
    return {**told, "facts": run_digest.facts(head["latest"])}


class Reader:
    """What one page was told, so that it hears only what is new."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: Sections | None = None
        self._points_until = 0.0

    def news(self) -> str:
        """The next message, JSON in one line. The first tells everything and has `begin`; then each section
        has `set`, the rows that are new or differ, and `gone`, the keys of those that are no more.
        """
        board, first = self._board, self._told is None
        now, rows = board.pools.clock.wall(), board.rows()
        message: dict[str, object] = {"now": round(now, 3)}
        if first:
            begin = {"boot": board.boot, "version": __version__, "actions": board.actions}
            message["begin"] = {**begin, "charts": run_digest.charts()}
        message["draining"] = board.pools.draining
        message["leased"] = sum(row["active"] for row in rows["pools"].values())
        if points := board.history.since(self._points_until):
            message["points"] = points
            self._points_until = max(float(each[-1][0] or 0) for each in points.values())
        told = self._told or {}
        for section, present in rows.items():
            if change := _change(told.get(section, {}), present):
                message[section] = change
        self._told = rows
        return json.dumps(message, allow_nan=False, separators=(",", ":"))


def _change(told: Rows, present: Rows) -> dict[str, object]:
    change: dict[str, object] = {}
    new = {
        key: row
        for key, row in present.items()
        if (old := told.get(key)) is not row and (old is None or old != row)
    }
    if new:
        change["set"] = new
    if gone := [key for key in told if key not in present]:
        change["gone"] = gone
    return change
