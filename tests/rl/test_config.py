"""Settings: one clear line for whatever is wrong, and the exit code 2."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rl.config import Config, load
from rl.errors import ConfigError


def write(path: Path, text: str) -> Path:
    file = path / "run.toml"
    file.write_text(text)
    return file


def test_defaults_read_back_to_themselves(tmp_path: Path) -> None:
    config = load(None, {})
    assert load(write(tmp_path, config.as_toml()), {}) == config


def test_every_value_survives_the_file(tmp_path: Path) -> None:
    config = load(None, {"families": ["sums", 'a"b:C'], "time_limit_seconds": 12.5, "model": "/m/é"})
    assert load(write(tmp_path, config.as_toml()), {}) == config


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "seed = 3\nsteps = 7\n")
    config = load(file, {"seed": 4, "steps": None})
    assert (config.seed, config.steps) == (4, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "unknown key 'stepz' = 3; did you mean 'steps'?"),
        ("[trainer]\nlerning_rate = 1", "key 'trainer.lerning_rate' = 1; did you mean 'learning_rate'?"),
        ("steps = 0", "steps = 0: input should be greater than or equal to 1"),
        ("samples_per_group = 1", "samples_per_group = 1"),
        ("steps = ", "is not valid TOML"),
        ("steps = '3'", "steps = '3': must be a number, without quotes"),
        ("runs_dir = ''", "runs_dir = '': must be a directory; leave it out"),
        ('runs_dir = "a\\u0000"', "runs_dir = 'a\\x00': must not contain a zero byte"),
        ("steps = true", "steps = True: must be a number, without quotes"),
        ("[trainer]\nlearning_rate = '1e-5'", "trainer.learning_rate = '1e-5': must be a number"),
        ("filter = 'no'", "filter = 'no': must be true or false"),
        ("families = 'sums'", "families = 'sums': must be a list, in brackets"),
        ("[generator]\nservers = ['nonsense']", "'nonsense' is no address of a server"),
        ("name = '../x'", "name = '../x'"),
        ("[queue]\nmin_samples = 9", "min_samples is 9, but samples_per_group only 8"),
        ("[queue]\npolicy = 'in_order'\nspare_groups = 2", "2 spare_groups could never be given up"),
        ("staleness_bound = 0\n[queue]\npolicy = 'drop_late'", "needs a staleness_bound of at least 1"),
        ("[generator]\nweights = 'nccl'", "nccl is for servers: name them in generator.servers"),
        ("[generator]\nservers = ['http://a:1']\nweights = 'file'", "servers take no files"),
        ("[curriculum]\nlow = 0.9", "curriculum.high"),
        ("[curriculum]\nlow = 0.5\nhigh = 0.5", "curriculum.high = 0.5: it must be above low, which is 0.5"),
        ("[curriculum]\nhihg = 0.9", "unknown key 'curriculum.hihg' = 0.9; did you mean 'high'?"),
        ("[curriculum]\noutside = 0", "curriculum.outside = 0: input should be greater than 0"),
        ("[queue]\npolicy = 'fifo'", "'in_order', 'windowed' or 'drop_late'"),
        ("[episode]\nturn_tokens = 2000", "context_tokens must be larger than turn_tokens"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file, {})
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere.toml", {})


def test_every_setting_is_documented() -> None:
    values: list[Any] = [getattr(Config(), name) for name in Config.model_fields]
    sections: list[type[BaseModel]] = [type(value) for value in values if isinstance(value, BaseModel)]
    sections.append(Config)
    for section in sections:
        lines = inspect.getsource(section).splitlines()
        for name in section.model_fields:
            if isinstance(section.model_fields[name].default, BaseModel) or name == "sandboxes":
                continue
            number = next(i for i, line in enumerate(lines) if line.startswith(f"    {name}: "))
            assert lines[number + 1].strip().startswith('"""'), name


def rl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_wrong_usage_ends_with_one_line_and_code_2_and_leaves_nothing(tmp_path: Path) -> None:
    result = rl("train", str(write(tmp_path, f"runs_dir = '{tmp_path}/runs'\nseeed = 1\n")))
    assert result.returncode == 2
    assert result.stderr.strip().count("\n") == 0
    assert "did you mean 'seed'" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_not_there_ends_with_code_2(tmp_path: Path) -> None:
    file = write(tmp_path, f"runs_dir = '{tmp_path}/runs'\nmodel = '/nowhere/model'\n")
    result = rl("train", str(file))
    assert result.returncode == 2
    assert "/nowhere/model" in result.stderr.strip().splitlines()[-1]


def test_resuming_without_a_checkpoint_ends_with_code_2(tmp_path: Path) -> None:
    result = rl("train", str(write(tmp_path, f"runs_dir = '{tmp_path}/runs'\n")), "--resume")
    assert result.returncode == 2
    assert "leave out --resume" in result.stderr
