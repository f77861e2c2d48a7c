"""What `sandboxd top` shows: tables for a terminal, lines for a pipe. What others wrote is no markup."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from sandboxd import run_digest
from sandboxd.overview import Row, Rows, Sections

COUNTS = ("WARM", "STARTING", "ACTIVE", "WAITING", "FAILED", "DELETING", "START", "PER S", "NEXT", "OLDEST")
# A terminal that is narrower than so many columns would cut every title short.
WIDE_COLUMNS = 110
FOR_WIDE_ONES = ("DELETING", "PER S")
COLOURS = {"OK": "green", "DEGRADED": "yellow", "DRAINING": "blue", "UNAVAILABLE": "red"}


def tables(known: Sections, now: float, width: int) -> Group:
    """All of it but what is empty, for so many columns; `now` is in seconds since 1970."""
    parts = [_pools(known["pools"], width), *_failures(known["failures"], now), *_runs(known["runs"])]
    parts += [*_tenants(known["tenants"]), *_leases(known["leases"], now)]
    spaced = [part for each in parts for part in (each, Text())]
    return Group(*spaced[:-1])


def lines(known: Sections, when: float) -> Iterator[str]:
    """A line for each pool, tenant and run; `when` is in seconds since 1970."""
    clock = time.strftime("%H:%M:%S", time.localtime(when))
    for name, row in known["pools"].items():
        cells = zip(COUNTS, _cells(row), strict=True)
        said = "  ".join(f"{title.lower()} {cell}" for title, cell in cells)
        yield f"{clock}  {name}  {row['state']}  {said}"
    for row in known["tenants"].values():
        counts = f"holds {row['active']}  callers waiting {row['waiting']}  for {row['wanted']}"
        yield f"{clock}  {row['pool']}  tenant {row['name']}  {counts}"
    for name, row in known["runs"].items():
        said = "  ".join(f"{title.lower()} {value}" for title, value in run_digest.facts(row["latest"]))
        solved = "  ".join(
            f"{family} {run_digest.percent(rate['latest'])}" for family, rate in row["families"].items()
        )
        yield f"{clock}  run {name}  {_progress(row)}" + (f"  solved {solved}  {said}" if solved else "")


def _pools(rows: Rows, width: int) -> Table:
    shown = [title for title in COUNTS if width >= WIDE_COLUMNS or title not in FOR_WIDE_ONES]
    table = _table("POOL", "STATE", *shown)
    for name, row in rows.items():
        cells = dict(zip(COUNTS, _cells(row), strict=True))
        table.add_row(name, Text(row["state"], COLOURS[row["state"]]), *(cells[title] for title in shown))
    reasons = [f"{name}: {row['state_reason']}" for name, row in rows.items() if row["state_reason"]]
    if reasons:
        table.caption, table.caption_justify = Text("\n".join(reasons)), "left"
    return table


def _cells(row: Row) -> list[str]:
    counts = (row["starting"], row["active"], row["waiting"], row["failed_total"], row["deleting"])
    return [
        f"{row['warm']} of {row['warm_target']}",
        *map(str, counts),
        _seconds(row["start_seconds"]),
        f"{row['starts_per_second']:.1f}",
        _seconds(row["next_free_seconds"]),
        _seconds(row["oldest_wait_seconds"]),
    ]


def _failures(rows: Rows, now: float) -> Iterator[Table]:
    if rows:
        table = _table("FAILED", "AGO", "PHASE", "CAUSE", "BECAUSE")
        for row in rows.values():
            table.add_row(
                row["sandbox"],
                _age(now - row["when"]),
                row["phase"],
                row["cause"].lower(),
                Text(row["message"]),
            )
        yield table


def _runs(rows: Rows) -> Iterator[Table]:
    for name, row in rows.items():
        table = _table("RUN", Column(Text(name)), "FAMILY", "FIRST", "LATEST")
        facts = [
            ["Progress", _progress(row)],
            *(run_digest.facts(row["latest"]) if row["step"] is not None else []),
        ]
        rates = [
            (family, run_digest.percent(rate["first"]), run_digest.percent(rate["latest"]))
            for family, rate in row["families"].items()
        ]
        for number in range(max(len(facts), len(rates))):
            fact = facts[number] if number < len(facts) else ("", "")
            rate = rates[number] if number < len(rates) else ("", "", "")
            table.add_row(*map(Text, (*fact, *rate)))
        yield table


def _progress(row: Row) -> str:
    if row["fault"]:
        return str(row["fault"])
    return "its first step has not ended" if row["step"] is None else f"step {row['step']:g}"


def _tenants(rows: Rows) -> Iterator[Table]:
    if rows:
        table = _table("TENANT", "POOL", "WEIGHT", "HOLDS", "CALLERS WAITING", "THEY WANT")
        for row in rows.values():
            counts = (row["weight"], row["active"], row["waiting"], row["wanted"])
            table.add_row(Text(row["name"]), row["pool"], *map(str, counts))
        yield table


def _leases(rows: Rows, now: float) -> Iterator[Table]:
    if rows:
        table = _table("LEASED", "HELD FOR", "ENDS IN", "TENANT", "HOLDER")
        for name, row in rows.items():
            ends = "-" if row["expires"] is None else _age(row["expires"] - now)
            held = f"{'' if row['exact'] else 'over '}{_age(now - row['since'])}"
            table.add_row(name, held, ends, Text(row["tenant"] or "-"), Text(row["holder"] or "-"))
        yield table


def _table(*titles: Column | str) -> Table:
    return Table(*titles, box=None, pad_edge=False)


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"


def _seconds(value: float | None) -> str:
    """For a narrow column: milliseconds below a second."""
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
