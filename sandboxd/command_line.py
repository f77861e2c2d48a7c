"""What the parts of the `sandboxd` command have in common: what they refuse, and how they are ended."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

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


async def until_told(work: Coroutine[Any, Any, int]) -> int:
    """SIGTERM ends the work as Ctrl-C does: leases are given back, a bench takes its daemon and files away.

    `timeout` and supervisors send it. The daemon has a handler of its own.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    if threading.current_thread() is not threading.main_thread():
        return await work
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
