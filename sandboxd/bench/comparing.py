"""Measurements beside each other: what `sandboxd bench compare` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from sandboxd.bench.schema import VERSION, Quantiles, Record
from sandboxd.config import ConfigError
from sandboxd.output import console

TIMES = (
    "ready_s", "acquire_s", "exec_s", "exec_at_once_s", "exec_beside_bombs_s", "release_s", "rollout_s",
    "fill_s", "health_s",
)  # fmt: skip
POINTS = ("p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True)
class Run:
    """What one file holds: `records` are its parts that can be compared, by what they measured."""

    name: str
    record: Record

    @property
    def records(self) -> dict[str, Record]:
        steps = self.record.sweep or [self.record]
        return {_key(step): step for step in steps}


def read(path: Path) -> Run:
    """Raises ConfigError where the file is not what --json writes."""
    try:
        return Run(path.stem, Record.model_validate(json.loads(path.read_text())))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"bench compare: {path} cannot be read: {why}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"bench compare: {path} is no JSON (line {error.lineno}): {error.msg}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"bench compare: {path} is no measurement of version {VERSION} or earlier: {where}:"
            f" {first['msg']}"
        ) from None


def _key(record: Record) -> str:
    """Sweeps are compared burst by burst, whatever ran them; other shapes as a whole."""
    return f"{record.shape} of {record.count}" if record.shape == "burst" else record.shape


def named(runs: Sequence[Run]) -> list[tuple[str, Run]]:
    """With names that tell them apart: two files may have one name in two folders."""
    names = [run.name for run in runs]
    return [
        (name if names.count(name) == 1 else f"{name} ({number})", run)
        for number, (name, run) in enumerate(zip(names, runs, strict=True), 1)
    ]


def columns(runs: Sequence[Run]) -> list[tuple[str, Run, dict[str, Record]]]:
    """One for each run, or for each target where a run is a sweep over several."""
    found = []
    for name, run in named(runs):
        targets: dict[str, dict[str, Record]] = {}
        for step in run.record.sweep or [run.record]:
            targets.setdefault(step.backend, {})[_key(step)] = step
        for target, records in targets.items():
            found.append((name if len(targets) == 1 else f"{name}: {target}", run, records))
    return found


def to_json(runs: Sequence[Run]) -> dict[str, object]:
    """`compared`: for each thing that was measured, what each run says of it, the first run first."""
    compared = columns(runs)
    keys = dict.fromkeys(key for _, _, records in compared for key in records)
    return {
        "compared": {
            key: [_told(name, records[key]) for name, _, records in compared if key in records]
            for key in keys
        }
    }


def _told(name: str, record: Record) -> dict[str, object]:
    times = {time: getattr(record, time) for time in TIMES}
    return {
        "run": name,
        "target": record.backend,
        "rate_per_s": record.rate_per_s,
        "failed": record.failed,
        "retries": record.retries,
        **{name: None if value is None else value.model_dump() for name, value in times.items()},
    }


def show(runs: Sequence[Run]) -> None:
    """Prints a table for each thing that was measured; the first run is what the others are divided by."""
    compared = columns(runs)
    keys = list(dict.fromkeys(key for _, _, records in compared for key in records))
    for key in keys:
        table = Table(key.upper(), *(name for name, _, _ in compared), box=None)
        for row in _rows([records.get(key) for _, _, records in compared]):
            table.add_row(*row)
        console().print(table)


def _rows(records: list[Record | None]) -> Iterator[list[str]]:
    yield ["target", *(record.backend if record else "-" for record in records)]
    for name in TIMES:
        for point in POINTS:
            values = [_point(record, name, point) for record in records]
            if any(value is not None for value in values):
                yield [f"{name.removesuffix('_s')} {point}", *_cells(values, 1e3, "ms")]
    rates = [None if record is None else record.rate_per_s for record in records]
    yield ["a second", *_cells(rates, 1.0, "")]
    yield ["failed", *("-" if record is None else str(record.failed) for record in records)]
    retries = [None if record is None else record.retries for record in records]
    if any(count is not None for count in retries):
        yield ["retries", *("-" if count is None else str(count) for count in retries)]


def _point(record: Record | None, name: str, point: str) -> float | None:
    times: Quantiles | None = getattr(record, name) if record is not None else None
    return None if times is None else float(getattr(times, point))


def _cells(values: list[float | None], factor: float, unit: str) -> Iterator[str]:
    """Each value, and behind all but the first how many times the first it is."""
    first = values[0]
    for number, value in enumerate(values):
        if value is None:
            yield "-"
            continue
        text = f"{value * factor:.2f} {unit}".strip()
        yield text if number == 0 or not first else f"{text} (x{value / first:.2f})"
