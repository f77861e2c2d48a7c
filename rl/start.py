"""Where a run begins: its directory, and the checkpoint that it goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl.checkpoint import LoopState, newest_checkpoint, read_state, remove_leftovers
from rl.config import SETTINGS_FILE, Config
from rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: at nothing, or at a checkpoint."""

    checkpoint: Path | None = None
    state: LoopState | None = None


def find_start(config: Config, *, resume: bool) -> Start:
    """Prepares the run's directory. A run of the same name that is not resumed is moved aside."""
    directory = config.directory
    checkpoint = newest_checkpoint(directory / "checkpoints")
    if resume and not (directory / SETTINGS_FILE).is_file():
        raise ConfigError(f"there is no run in {directory} to go on with; leave out --resume")
    if resume and checkpoint is not None:
        remove_leftovers(checkpoint.parent)
        return Start(checkpoint, read_state(checkpoint))
    # A run that ended before it saved anything has nothing to go on from: it begins anew.
    if directory.exists():
        number = 1
        while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
            number += 1
        directory.rename(aside)
    directory.mkdir(parents=True)
    (directory / SETTINGS_FILE).write_text(config.as_toml())
    return Start()
