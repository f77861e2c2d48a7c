"""Shows findings: a table on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sandboxd.doctor.capacity import Share
from sandboxd.doctor.facts import Demand
from sandboxd.doctor.findings import Finding, Verdict, worst

COLOURS = {
    Verdict.OK: "green",
    Verdict.UNKNOWN: "dim",
    Verdict.WARNING: "yellow",
    Verdict.FAILURE: "bold red",
}


def to_json(
    findings: Sequence[Finding], demands: Sequence[Demand], given: Mapping[str, Share]
) -> dict[str, Any]:
    """The report as docs/operations.md describes it."""
    return {
        "verdict": worst(findings).value,
        "pools": [
            {
                "pool": demand.pool,
                "backend": demand.backend,
                "size_limit": demand.count,
                "carried": given[demand.pool].count,
                "bound_by": _bound_by(given[demand.pool]),
            }
            for demand in demands
        ],
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _bound_by(share: Share) -> str | None:
    return share.limit.check if share.limit is not None else None


def as_json(report: Mapping[str, Any]) -> str:
    """One JSON object, indented."""
    return json.dumps(report, indent=2)


def show(
    console: Console, findings: Sequence[Finding], demands: Sequence[Demand], given: Mapping[str, Share]
) -> None:
    """Prints the checks, then for each that is not well what mends it, then what the pools may have."""
    if console.is_terminal:
        _show_table(console, findings)
    else:
        _show_lines(console, findings)
    for finding in findings:
        if finding.fix:
            _line(console, f"{finding.verdict}: {finding.title}: {finding.fix}")
    for demand in demands:
        _line(console, in_words(demand, given[demand.pool]))


def in_words(demand: Demand, share: Share) -> str:
    """What a pool asked for and may have."""
    said = f"pool {demand.pool} ({demand.backend}): {share.count} of {demand.count} sandboxes are carried"
    return said if share.limit is None else f"{said}, bound by {share.limit.title}"


def _show_table(console: Console, findings: Sequence[Finding]) -> None:
    table = Table("", "CHECK", "NOW", "NEEDED", box=None)
    for finding in findings:
        colour = COLOURS[finding.verdict]
        table.add_row(
            f"[{colour}]{finding.verdict}[/]", *map(_plain, (finding.title, finding.current, finding.needed))
        )
    console.print(table)


def _plain(text: str) -> str:
    """What a host says may look like markup."""
    return text.replace("[", "\\[")


def _show_lines(console: Console, findings: Sequence[Finding]) -> None:
    width = max((len(finding.title) for finding in findings), default=0)
    for finding in findings:
        row = f"{finding.verdict:8} {finding.title:{width}}  {finding.current} (needed: {finding.needed})"
        _line(console, row)


def _line(console: Console, text: str) -> None:
    """One line, however long: what reads it may be a program."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
