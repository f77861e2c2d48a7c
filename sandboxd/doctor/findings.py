"""What a check has found."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from sandboxd.doctor.facts import UNLIMITED


class Verdict(enum.StrEnum):
    """FAILURE: fewer sandboxes than asked for, or none. WARNING: all, with less. UNKNOWN: unreadable."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    FAILURE = "failure"


_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `check` is its lasting name; the values are None where `current` and `needed` are words."""

    check: str
    title: str
    verdict: Verdict
    current: str
    needed: str
    fix: str = ""
    current_value: int | None = None
    needed_value: int | None = None


def worst(findings: Iterable[Finding]) -> Verdict:
    """The gravest verdict; UNKNOWN counts as OK beside others, since it stops nothing."""
    grave = max((finding.verdict for finding in findings), key=_ORDER.index, default=Verdict.OK)
    return Verdict.OK if grave is Verdict.UNKNOWN else grave


def compare(
    check: str, title: str, value: int | None, needed: int, *, fix: str, short: Verdict = Verdict.WARNING
) -> Finding:
    """A finding on a number of which more is better; `short` is the verdict when there is too little."""
    if value is None:
        return Finding(check, title, Verdict.UNKNOWN, "cannot be read", str(needed), needed_value=needed)
    enough = value >= needed
    return Finding(
        check=check,
        title=title,
        verdict=Verdict.OK if enough else short,
        current=number(value),
        needed=number(needed),
        fix="" if enough else fix,
        current_value=value,
        needed_value=needed,
    )


def compare_bytes(check: str, title: str, value: int | None, needed: int, *, fix: str) -> Finding:
    """As `compare`, in GiB for the reader; too little is a warning."""
    known = value is not None
    enough = value is None or value >= needed
    return Finding(
        check=check,
        title=title,
        verdict=(Verdict.OK if enough else Verdict.WARNING) if known else Verdict.UNKNOWN,
        current=gibibytes(value) if value is not None else "cannot be read",
        needed=gibibytes(needed),
        fix="" if enough else fix,
        current_value=value,
        needed_value=needed,
    )


def number(value: int) -> str:
    """As a person reads it."""
    return "unlimited" if value >= UNLIMITED else str(value)


def gibibytes(value: int) -> str:
    """As a person reads it."""
    return "unlimited" if value >= UNLIMITED else f"{value / (1 << 30):.1f} GiB"
