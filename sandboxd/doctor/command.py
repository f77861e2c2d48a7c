"""The `sandboxd doctor` command: puts together what is asked, what is there, and what is said of it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sandboxd.config import Config, ConfigError, load
from sandboxd.doctor import probes, report
from sandboxd.doctor.capacity import limits, shares
from sandboxd.doctor.checks import DOCKER_ROOT, examine
from sandboxd.doctor.demands import demands
from sandboxd.doctor.facts import Demand, Directory, Facts
from sandboxd.doctor.findings import Verdict, worst
from sandboxd.doctor.reading import read, read_directory

COUNT = 960


async def run(arguments: argparse.Namespace) -> int:
    """`sandboxd doctor`: 1 when a check failed; warnings and what cannot be read leave it 0.

    Raises ConfigError.
    """
    config = load(arguments.config, state_dir=arguments.state_dir)
    asked = _asked(arguments, config)
    facts = await look(config, asked)
    findings = examine(facts, asked)
    given = shares(limits(facts), asked)
    if arguments.json:
        print(report.as_json(report.to_json(findings, asked, given)))
    else:
        report.show(Console(), findings, asked, given)
    return 1 if worst(findings) is Verdict.FAILURE else 0


def _asked(arguments: argparse.Namespace, config: Config) -> list[Demand]:
    """The pools of the settings file; without one, so many sandboxes of the default pool."""
    if arguments.config is not None:
        if arguments.count is not None or arguments.backend is not None:
            raise ConfigError(
                "doctor --config takes the pools' own size_limit: leave out --count and --backend"
            )
        return demands(config)
    count = COUNT if arguments.count is None else arguments.count
    if count < 1:
        raise ConfigError(f"--count {count}: must be at least 1")
    (default,) = demands(config)
    return [dataclasses.replace(default, count=count, backend=arguments.backend or default.backend)]


async def look(config: Config, asked: Sequence[Demand]) -> Facts:
    """All facts, those that need a try among them."""
    backends = {demand.backend for demand in asked}
    state = read_directory("state_dir", config.state_dir)
    images = read_directory("images_dir", config.images_dir)
    namespaces: str | None = None
    directories: tuple[Directory, ...] = (state, images)
    if "namespace" in backends:
        namespaces, directories = await probes.try_all(state, images)
    engine = await probes.ask_engine()
    if "docker" in backends and engine.root:
        directories = (*directories, read_directory(DOCKER_ROOT, Path(engine.root)))
    return dataclasses.replace(read(directories=directories), namespaces=namespaces, engine=engine)
