"""Files with a line a step: cut back to a checkpoint, and written late when the disk is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.checkpoint import LoopState
from rl.step_log import StepLog, StepLogs


def test_a_resumed_run_keeps_what_its_checkpoint_knew_and_nothing_later(tmp_path: Path) -> None:
    logs = StepLogs.open(tmp_path, None, print)
    for step in (1, 2):
        logs.metrics.write({"step": step})
        logs.tasks.write({"step": step, "trained": ["a"]})
    state = LoopState(2, 2, {}, lengths=logs.sync())
    logs.metrics.write({"step": 3})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "to')
    again = StepLogs.open(tmp_path, state, print)
    assert [row["step"] for row in again.metrics.rows] == [1, 2]
    again.metrics.write({"step": 3, "again": 1})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert again.tasks.rows[-1] == {"step": 2, "trained": ["a"]}


@pytest.mark.parametrize("content", [b"", b'{"step": 1}\n{"ste'])
def test_a_file_that_lost_lines_keeps_the_whole_ones(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    log = StepLog(tmp_path / "log", 500, print)
    assert [row["step"] for row in log.rows] == [1] * bool(content)
    log.write({"step": 2})
    assert (tmp_path / "log").read_bytes() == content[:12] + b'{"step": 2}\n'


def test_a_run_that_begins_anew_empties_the_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old\n")
    assert StepLog(tmp_path / "log", None, print).rows == []
    assert (tmp_path / "log").read_bytes() == b""


def test_lines_that_a_full_disk_refuses_wait(tmp_path: Path) -> None:
    told: list[str] = []
    log = StepLog(tmp_path / "log", None, told.append)
    log.write({"step": 1})
    real = tmp_path / "real"
    (tmp_path / "log").rename(real)
    (tmp_path / "log").symlink_to("/dev/full")
    log.write({"step": 2})
    log.write({"step": 3})
    assert told == [f"{tmp_path / 'log'} takes no line: No space left on device; its lines wait in memory"]
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    real.rename(tmp_path / "log")
    log.write({"step": 4})
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert log.last_step == 4
