"""What the command line's parts print: JSON where it is asked for, else words and tables for a person."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

# Tables are cut to a terminal; a file or a pipe has room.
PIPE_COLUMNS = 160
STDOUT = Path("-")


class Parser(argparse.ArgumentParser):
    """One whose complaint is one line that says where help is."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def take_any_text() -> None:
    """Standard output takes any text from now on, as standard error does: file names need be no UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def console() -> Console:
    """Standard output. What sandboxes and callers wrote is no markup; NO_COLOR is respected."""
    found = Console(markup=False, highlight=False)
    return found if found.is_terminal else Console(markup=False, highlight=False, width=PIPE_COLUMNS)


def add_json(parser: argparse.ArgumentParser, about: str = "one JSON object") -> None:
    """The option of a part that prints what it has done or found."""
    parser.add_argument("--json", action="store_true", help=f"{about} (docs/commands.md)")


def add_json_file(parser: Any) -> None:
    """The option of a part that measures."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the result here, too; without FILE to standard output, and tables to standard error",
    )


def say(words: str, values: Mapping[str, object], *, as_json: bool) -> None:
    """One line about what was done."""
    sys.stdout.write(f"{json.dumps(values) if as_json else words}\n")


@contextlib.contextmanager
def tables_aside(target: Path | None) -> Iterator[None]:
    """Within the block tables go to standard error where the JSON goes to standard output by `write_json`."""
    if target != STDOUT:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def write_json(target: Path, text: str) -> None:
    """To a file, or past `tables_aside` to standard output. Raises OSError."""
    if target != STDOUT:
        target.write_text(text)
        return
    assert sys.__stdout__ is not None
    sys.__stdout__.write(text)
    sys.__stdout__.flush()
