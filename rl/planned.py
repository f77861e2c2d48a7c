"""Runs that a comparison is made of: each trained in a process of its own, once, and kept.

A run that is there and finished is not made again, so a comparison that was stopped goes on where it was. One
that was made with other settings is never taken for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from rl.config import SETTINGS_FILE, Config, load
from rl.errors import ConfigError, RlError

SUMMARY_FILE = "summary.json"

ELSEWHERE = ("runs_dir", "models_dir", "sandboxes")
"""Settings that say where things are, and not what is trained."""


class RunFailed(RlError):
    """A run of a comparison did not end well."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training: what it adds to the command line of `train`, and the settings that this means."""

    flags: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """One run, and the arguments of `python -m rl` that make it, which mean `config`."""

    arguments: tuple[str, ...]
    config: Config

    @property
    def directory(self) -> Path:
        return self.config.directory

    @property
    def done(self) -> bool:
        return (self.directory / SUMMARY_FILE).is_file()


Train = Callable[[Sequence[str]], int]
"""Runs `python -m rl` with these arguments, and returns its exit code."""


def in_process(arguments: Sequence[str]) -> int:
    """A process for each run: an engine's memory goes with its process. It reports on standard error."""
    command = [sys.executable, "-m", "rl", *arguments]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # It ends in order, which takes 10 s at most.
            process.terminate()
            process.wait()
            raise


def plan(file: Path, name: str, arm: Arm, common: Mapping[str, object]) -> Planned:
    """The run `name` of the settings in `file`, in the directory of those settings.

    `common` are settings that all runs of a comparison have beside the file's: `seed`, `steps`. Raises
    ConfigError.
    """
    runs_dir = load(file, {}).directory
    options = [f"--{key}={value}" for key, value in common.items() if value is not None]
    given = {**common, **arm.settings, "name": name, "runs_dir": runs_dir}
    arguments = ("train", str(file), "--runs-dir", str(runs_dir), "--name", name, *options, *arm.flags)
    return Planned(arguments, load(file, given))


def make(planned: Planned, train: Train, console: Console) -> None:
    """Makes the run unless it is there. Raises ConfigError when that one has other settings; RunFailed."""
    if planned.done:
        check_same(planned.directory, planned.config)
        console.print(f"{planned.directory} is there", markup=False)
        return
    console.print(f"training {planned.directory}", markup=False)
    code = train(planned.arguments)
    if code != 0:
        raise RunFailed(
            f"{planned.directory} ended with exit code {code}; the same command goes on with what is missing"
        )


def check_same(run: Path, config: Config, only: Collection[str] = ()) -> None:
    """Raises ConfigError unless a finished run was made with the settings that are asked for now; of those
    settings and sections `only`, where some are named."""
    made, wanted = (_flat(config) for config in (load(run / SETTINGS_FILE, {}), config))
    asked = [key for key in wanted if not only or {key, key.partition(".")[0]} & set(only)]
    other = next((key for key in asked if made.get(key) != wanted[key]), None)
    if other is not None:
        raise ConfigError(
            f"{run} was made with {other} = {made.get(other)!r}, and {wanted[other]!r} is "
            "asked for: move that directory away, or ask for the same"
        )


def _flat(config: Config) -> dict[str, Any]:
    """Settings by their full names, without those that say where things are."""
    found: dict[str, Any] = {}
    for key, value in config.model_dump(mode="json", exclude=set(ELSEWHERE)).items():
        found |= (
            {f"{key}.{inner}": each for inner, each in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    return found
