"""`sandboxd completion SHELL`: what has a shell complete commands, options, choices and file names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completions of `parser` in the language of `shell`: bash, zsh or fish."""
    for action in _actions(parser):
        if action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of all commands below it; argparse has no public way to them, other tools go this one, too."""
    for action in parser._actions:  # noqa: SLF001
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for inner in action.choices.values():
                yield from _actions(inner)
