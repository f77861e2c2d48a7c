"""Ctrl-C and `--resume` on the whole program: real daemon, real engine, real trainer, a tiny random model."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rl.checkpoint import newest_checkpoint, read_state
from rl.model import SMOLLM2, build_tiny_model, prepare_model
from rl.processes import descendants
from rl.weights import PREFIX, SHARED_MEMORY

ROOT = Path(__file__).parents[2]
END_SECONDS = 10.0

SETTINGS = """
name = "it"
runs_dir = "{runs}"
model = "{model}"
families = ["sums"]
# Of random weights nothing is ever solved: without the filter such groups still make batches.
filter = false
groups_per_batch = 1
samples_per_group = 2
concurrent_episodes = 8
checkpoint_every_steps = 0
[episode]
turn_tokens = 4
[generator]
kv_cache_bytes = 134217728
[heldout]
per_kind = 1
per_level = 1
[sandboxes]
warm = 2
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    model = build_tiny_model(tmp_path / "tiny", prepare_model(SMOLLM2, ROOT / "models"))
    file = tmp_path / "run.toml"
    file.write_text(SETTINGS.format(runs=tmp_path / "runs", model=model))
    return file


@contextmanager
def training(settings: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a process group of its own, as a terminal would start it."""
    command = [sys.executable, "-m", "rl", "train", str(settings), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError("".join(seen))


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C: everything has ended within 10 s, and nothing is left of it."""
    started = descendants(process.pid)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=2 * END_SECONDS)
    assert time.monotonic() - began < END_SECONDS, output
    assert process.returncode == 130, output
    assert "Traceback" not in output
    for pid in started:
        wait_for_end(pid, began + END_SECONDS)
    assert [pid for pid in started if alive(pid)] == []
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}{process.pid}-*"))


def wait_for_end(pid: int, deadline: float) -> None:
    """Waits for a process that ends after its program, as the one that looks after what that leaves."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if alive(pid):
                select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)


def alive(pid: int) -> bool:
    """Python's resource tracker may outlast its program by a moment; a zombie is not alive."""
    try:
        tracker = b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return not tracker and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_ctrl_c_while_the_engine_starts(settings: Path) -> None:
    with training(settings) as process:
        read_until(process, "starting the generator")
        interrupt(process)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_while_training_saves_and_resume_goes_on(settings: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "it"
    with training(settings, "--steps", "100000") as process:
        read_until(process, "step 2/")
        interrupt(process)
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    step = read_state(checkpoint).step
    assert step >= 2
    with training(settings, "--resume", "--steps", str(step + 2)) as process:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == step + 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, step + 3))
    assert (run / "report.html").is_file()
