"""The bench's results as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from rl.bench.cell import Outcome

COLUMNS = (
    "arm", "step s", "steps x", "tokens x", "wait", "gen idle", "gen use", "stale mean", "max", "length bias",
    "late", "books", "discarded attempts",
)  # fmt: skip


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """One for each world."""
    made: dict[tuple[float, str, str], Table] = {}
    for each in outcomes:
        if each.world not in made:
            made[each.world] = _empty(each)
        made[each.world].add_row(*_cells(each))
    return list(made.values())


def _empty(first: Outcome) -> Table:
    title = f"generator / trainer {first.rate:g}, tail {first.tail}, sandboxes {first.sandboxes}"
    table = Table(title=title, title_justify="left", box=None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("arm", "discarded attempts") else "right")
    return table


def _cells(each: Outcome) -> tuple[str, ...]:
    return (
        each.arm,
        f"{each.step_seconds:.2f}",
        f"{each.speedup:.2f}" if each.speedup else "-",
        f"{each.speedup_tokens:.2f}" if each.speedup else "-",
        f"{each.wait_ratio:.1%}",
        f"{each.generator_idle:.0%}",
        f"{each.generator_use:.0%}",
        f"{each.staleness_mean:.2f}",
        f"{each.staleness_max:g}",
        f"{each.length_bias:+.1%}",
        f"{each.late_share:.1%}",
        "closed" if each.ledger_closed else "OPEN",
        ", ".join(f"{reason} {count}" for reason, count in each.discarded.items()) or "-",
    )
