"""Follows the `metrics.jsonl` of a training run as it grows: a row of numbers for each step.

For the live page and `sandboxd top`. The file may not be there yet, end in half a line, or be cut back and
go on differently when its run is resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Collection, Iterable
from pathlib import Path

from sandboxd.overview import Row, Rows
from sandboxd.run_digest import FAMILY, KEYS, families

FILE = "metrics.jsonl"
STEPS_KEPT = 500
READ_BYTES = 16 << 20
# So many bytes before the place reached are compared: a file that was cut back and has grown again is
# another, also where it is longer than before.
MARK_BYTES = 64


class Run:
    """One run's directory. `steps` holds the latest rows by `NAME/STEP`; the name is the directory's unless
    another is given.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.name = name or directory.resolve().name
        self.steps: Rows = {}
        self.fault = ""
        self._path = directory / FILE
        self._offset = 0
        self._mark = b""
        self._digest = self._digested()

    def head(self) -> Row:
        """What its steps come to: the last one's number and metrics, solve rates by family, and `fault`, why
        nothing newer is known; empty where nothing is wrong. `step` is None before the first.
        """
        return {"fault": self.fault, **self._digest}

    def _digested(self) -> Row:
        steps = list(self.steps.values())
        last = steps[-1] if steps else {}
        latest = {key: value for key, value in last.items() if key in KEYS or key.startswith(FAMILY)}
        return {"step": last.get("step"), "latest": latest, "families": families(steps)}

    async def look(self) -> bool:
        """Reads what is new; True where anything is."""
        before = (self.fault, self._offset, self._mark)
        read = await asyncio.to_thread(self._read)
        if read is not None:
            self._take(*read)
        return (self.fault, self._offset, self._mark) != before

    def _read(self) -> tuple[int, bytes] | None:
        """Where the reading began, and whole lines from there on; None where the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                begin = self._offset
                file.seek(max(0, begin - len(self._mark)))
                if file.read(len(self._mark)) != self._mark:
                    begin = 0
                    file.seek(0)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            self.fault = f"{FILE} is not there yet"
            return None
        except OSError as error:
            self.fault = f"{FILE} cannot be read: {error.strerror}"
            return None
        self.fault = ""
        return begin, data[: data.rfind(b"\n") + 1]

    def _take(self, begin: int, data: bytes) -> None:
        if begin != self._offset:
            self.steps, self._mark = {}, b""
        for line in data.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                self._add(json.loads(line))
        self._offset = begin + len(data)
        self._mark = (self._mark + data)[-MARK_BYTES:]
        if len(self.steps) > STEPS_KEPT:
            self.steps = dict(list(self.steps.items())[-STEPS_KEPT:])
        else:
            self.steps = dict(self.steps)
        self._digest = self._digested()

    def _add(self, row: object) -> None:
        """A line that is no row of numbers with a step is passed over."""
        if not isinstance(row, dict) or _number(step := row.get("step")) is None:
            return
        numbers = {
            key: value
            for key in row
            if (key in KEYS or key.startswith(FAMILY)) and (value := _number(row[key])) is not None
        }
        key = f"{self.name}/{step:g}"
        # Where a run was resumed, what it did after that step has not happened.
        for later in [each for each, old in self.steps.items() if old["step"] >= step]:
            del self.steps[later]
        self.steps[key] = {"run": self.name, "step": step, **numbers}


def followed(directories: Iterable[Path]) -> list[Run]:
    """Those in these directories, each once. Where several are called the same, as much of their paths as
    tells them apart is their name: `a/demo`, `b/demo`.
    """
    found = {directory.resolve(): directory for directory in directories}
    return [Run(directory, _name(path, found)) for path, directory in found.items()]


def _name(path: Path, others: Collection[Path]) -> str:
    for count in range(1, len(path.parts)):
        end = path.parts[-count:]
        if sum(other.parts[-count:] == end for other in others) == 1:
            return "/".join(end)
    return str(path)


def _number(value: object) -> float | None:
    """What JavaScript can read as a number: finite, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
