"""What the parts of the `sandboxd` command have in common: paths and addresses that are none."""

from __future__ import annotations

import argparse
from pathlib import Path

from sandboxd import addresses
from sandboxd.config import ConfigError, default_address
from sandboxd.errors import InvalidRequest


def given_path(text: str) -> Path:
    """A path of the command line. An empty one is a shell variable that was not set, not this directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def check_address(arguments: argparse.Namespace) -> None:
    """Raises ConfigError where the daemon that is asked for, or named by the environment, cannot be one."""
    # A bench without an address has a daemon of its own.
    if not hasattr(arguments, "address") or (arguments.part == "bench" and not arguments.address):
        return
    try:
        addresses.check(arguments.address or default_address())
    except InvalidRequest as error:
        raise ConfigError(f"{error}; name it with --address or SANDBOXD_ADDRESS") from None
