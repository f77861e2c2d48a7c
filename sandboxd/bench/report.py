"""A measurement as a table for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sandboxd.bench.burst import Result, quantiles

FAILURES_SHOWN = 5


def show(result: Result) -> None:
    """Prints times, failures and leaks to standard output."""
    console = Console()
    options = result.options
    console.print(
        f"burst of {options.count} on {options.backend}: {len(result.ready)} ready in {result.wall:.2f} s,"
        f" {len(result.failures)} failed, {result.alive_after_hold} alive after the hold",
        highlight=False,
    )
    table = Table("", "p50", "p90", "p99", "max", box=None)
    for name, values in (("request to first command done", result.ready), ("first command", result.exec)):
        summary = quantiles(values)
        if summary:
            table.add_row(name, *(f"{summary[key] * 1e3:.1f} ms" for key in ("p50", "p90", "p99", "max")))
    console.print(table)
    left = ", ".join(f"{count} {kind}" for kind, count in result.leaked.items())
    console.print(f"left behind: {left}", highlight=False)
    for failure in result.distinct_failures()[:FAILURES_SHOWN]:
        console.print(f"failure: {failure}", markup=False, highlight=False, soft_wrap=True)
