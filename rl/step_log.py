"""Files with one JSON line a step, which a resumed run cuts back to where its checkpoint found them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.checkpoint import LoopState, sync

METRICS_FILE, TASKS_FILE = "metrics.jsonl", "tasks.jsonl"


class StepLog:
    """One such file, and its rows in memory. `length` is how many bytes of it are whole lines.

    A disk that takes no line ends no run: lines wait in memory and are written with the next one.
    """

    def __init__(self, path: Path, length: int | None, tell: Callable[[str], None]) -> None:
        """Keeps the first `length` bytes of what is there; begins anew when None. `tell` gets a line for a
        person. Raises OSError."""
        self._path = path
        self._tell = tell
        self._late: list[bytes] = []
        self._told = False
        content = b""
        if length is not None and path.is_file():
            content = path.read_bytes()[:length]
            content = content[: content.rfind(b"\n") + 1]
        with path.open("ab") as file:
            file.truncate(len(content))
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
        self.length = len(content)

    @property
    def last_step(self) -> float:
        return float(self.rows[-1]["step"]) if self.rows else 0.0

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row. It must hold `step`."""
        kept = dict(row)
        self.rows.append(kept)
        self._late.append(f"{json.dumps(kept)}\n".encode())
        try:
            self._flush()
        except OSError as error:
            if not self._told:
                self._tell(f"{self._path} takes no line: {error.strerror}; its lines wait in memory")
            self._told = True

    def _flush(self) -> None:
        lines = b"".join(self._late)
        with self._path.open("r+b") as file:
            # Not at the end: there may be half of what did not fit the last time.
            file.seek(self.length)
            file.write(lines)
        self.length += len(lines)
        self._late.clear()
        self._told = False

    def sync(self) -> None:
        """Puts everything on the disk. Raises OSError."""
        if self._late:
            self._flush()
        sync(self._path)


@dataclass(frozen=True, slots=True)
class StepLogs:
    """`metrics` has a row of numbers for each step, `tasks` what became of tasks."""

    metrics: StepLog
    tasks: StepLog

    @classmethod
    def open(cls, directory: Path, state: LoopState | None, tell: Callable[[str], None]) -> StepLogs:
        """Cut back to `state`; empty without one. Raises OSError."""
        lengths = dict.fromkeys((METRICS_FILE, TASKS_FILE)) if state is None else state.lengths
        metrics, tasks = (
            StepLog(directory / name, lengths.get(name, 0) if state else None, tell)
            for name in (METRICS_FILE, TASKS_FILE)
        )
        return cls(metrics, tasks)

    @property
    def seconds(self) -> float:
        """Of training, up to the last row."""
        rows = self.metrics.rows
        return float(rows[-1].get("time/wall", 0.0)) if rows else 0.0

    def sync(self) -> dict[str, int]:
        """Puts both on the disk; returns their lengths by name. Raises OSError."""
        self.metrics.sync()
        self.tasks.sync()
        return {METRICS_FILE: self.metrics.length, TASKS_FILE: self.tasks.length}
