"""What a person sees while a run goes on: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sandboxd import PoolStats

SHOWN_ROWS = 8
COLUMNS = (
    *("STEP", "SOLVED", "TOKENS/S", "BUFFER", "EPISODES", "WAIT"),
    *("SANDBOXES WARM/ACTIVE/FAILED", "LEFT"),
)


class Progress:
    """`with Progress(steps) as progress:`; `say` for stages, `step` after each step.

    `deadline` is on `clock`; the remaining time is the smaller of what the steps and the deadline say.
    """

    def __init__(
        self,
        steps: int,
        *,
        deadline: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._deadline = deadline
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._began = clock()
        self._first: tuple[float, float] | None = None
        self._rows: list[tuple[str, ...]] = []
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line about what happens now."""
        self._console.print(f"[{self._clock() - self._began:6.1f} s] {text}", markup=False, soft_wrap=True)

    def until(self, deadline: float | None) -> None:
        """Sets the deadline once it is known."""
        self._deadline = deadline

    def step(self, row: Mapping[str, float], pool: PoolStats | None) -> None:
        """One step is done; `pool` tells of the sandboxes."""
        cells = self._cells(row, pool)
        self._rows = [*self._rows[-SHOWN_ROWS + 1 :], tuple(cells.values())]
        if self._live:
            self._live.update(self._table())
        else:
            line = ", ".join(f"{name.lower()} {value}" for name, value in cells.items())
            self._console.print(line, markup=False, soft_wrap=True)

    def _cells(self, row: Mapping[str, float], pool: PoolStats | None) -> dict[str, str]:
        sandboxes = "-"
        if pool is not None:
            sandboxes = f"{pool.warm}/{pool.active}/{pool.start_failures_total + pool.lost_total}"
        return {
            "STEP": f"{row['step']:.0f}/{self._steps}",
            "SOLVED": f"{row.get('solve_rate/all', float('nan')):.2f}",
            "TOKENS/S": f"{row.get('rollout/generated_tok_s', 0.0):.0f}",
            "BUFFER": f"{row.get('buffer/depth', 0.0):.0f}",
            "EPISODES": f"{row.get('rollout/inflight', 0.0):.0f}{_of(row.get('concurrency/max_inflight'))}",
            "WAIT": f"{row.get('perf/wait_time_ratio', 0.0):.0%}",
            "SANDBOXES WARM/ACTIVE/FAILED": sandboxes,
            "LEFT": self._remaining(row["step"]),
        }

    def _remaining(self, step: float) -> str:
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        done, elapsed = step - self._first[0], now - self._first[1]
        guesses = []
        if done > 0:
            guesses.append((self._steps - step) * elapsed / done)
        if self._deadline is not None:
            guesses.append(max(0.0, self._deadline - now))
        return f"{min(guesses) / 60:.1f} min" if guesses else "-"

    def _table(self) -> Table:
        table = Table(box=None)
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for cells in self._rows:
            table.add_row(*cells)
        return table


def _of(limit: float | None) -> str:
    return "" if limit is None else f"/{limit:.0f}"
