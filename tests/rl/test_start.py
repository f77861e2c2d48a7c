"""Where a run begins: at nothing, or at the newest checkpoint of the run that is resumed."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rl.checkpoint import LoopState, write_checkpoint
from rl.config import Config, load
from rl.config_curriculum import CurriculumConfig
from rl.curriculum import BandSettings, SolveRateBands, Uniform
from rl.errors import ConfigError
from rl.fakes import FakeTrainer
from rl.progress import Progress
from rl.run import task_source
from rl.session import Session
from rl.start import Start, find_start
from rl.tasks import TaskSource
from rl.tasks.sums import Sums


def config(path: Path) -> Config:
    return load(None, {"runs_dir": path, "name": "r", "families": ["sums"]})


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run in .*/r to go on with; leave out --resume"):
        find_start(config(tmp_path), resume=True)


def test_a_run_that_saved_nothing_yet_begins_anew(tmp_path: Path) -> None:
    assert find_start(config(tmp_path), resume=False) == Start()
    (tmp_path / "r" / "metrics.jsonl").write_text("half of a li")
    assert find_start(config(tmp_path), resume=True) == Start()
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["config.toml"]
    assert (tmp_path / "r.old-1" / "metrics.jsonl").exists()


def state_at(step: int) -> Callable[[int], LoopState]:
    return lambda _: LoopState(step, step, {})


def test_a_resumed_run_begins_at_its_newest_checkpoint_and_clears_up(tmp_path: Path) -> None:
    find_start(config(tmp_path), resume=False)
    place = tmp_path / "r" / "checkpoints"
    for step in (9, 10):
        asyncio.run(write_checkpoint(place, FakeTrainer(), state_at(step)))
    (place / ".partial").mkdir()
    start = find_start(config(tmp_path), resume=True)
    assert start.state == LoopState(10, 10, {})
    assert start.checkpoint == place / "step-000010"
    assert not (place / ".partial").exists()


def test_a_checkpoint_of_another_curriculum_is_refused(tmp_path: Path) -> None:
    """`filter` was changed between the two."""
    source = TaskSource([Sums()])
    state = LoopState(1, 1, Uniform(source, [("sums", 0)], seed=0).state_dict())
    wanted = replace(Start(), state=state)
    session = Session(config(tmp_path), wanted, Progress(1, console=Console(file=io.StringIO())), 0.0)
    with pytest.raises(
        ConfigError, match=r"filter = True: the checkpoint is of a run with another curr.* 'open'"
    ):
        session.curriculum(task_source(config(tmp_path)))


def test_the_curriculum_has_the_band_of_the_settings(tmp_path: Path) -> None:
    """At 0.75 a level is in the band by default, and out of one that ends at 0.6."""
    rates = []
    for band in (CurriculumConfig(), CurriculumConfig(high=0.6, outside=0.01)):
        wanted = config(tmp_path).model_copy(update={"curriculum": band})
        session = Session(wanted, Start(), Progress(1, console=Console(file=io.StringIO())), 0.0)
        curriculum = session.curriculum(task_source(wanted))
        assert isinstance(curriculum, SolveRateBands)
        curriculum.observe(TaskSource([Sums()]).train("sums", 0, 0), [1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
        rates.append(curriculum.weight(("sums", 0)))
    assert rates == [pytest.approx(27 / 4 * 0.75 * 0.25**2), 0.01]
    assert BandSettings(**CurriculumConfig().model_dump()) == BandSettings()
