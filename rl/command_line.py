"""What the loop's commands have in common on the command line: complaints, examples, JSON for programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from rl.errors import ConfigError

STDOUT = Path("-")
EXAMPLES: dict[str, dict[str, str]] = {
    "train": {
        "python -m rl train": "the default settings",
        "python -m rl train configs/demo.toml --name mine --steps 20": "one's own settings",
        "python -m rl train configs/demo.toml --resume": "go on from the last checkpoint",
    },
    "eval": {
        "python -m rl eval --task sums --tasks 8 --samples 5 --k 1,5": "the packaged model",
        "python -m rl eval --task sums --endpoint http://127.0.0.1:8000/v1 --model NAME": "a server's",
    },
    "report": {
        "python -m rl report runs/demo": "write its page again",
        "python -m rl report runs/a runs/b": "side by side",
    },
    "bench": {
        "python -m rl bench --quick": "a few worlds only",
        "python -m rl bench --full --json figures.json --plot figures.png": "all of them",
    },
    "study": {"python -m rl study configs/curriculum.toml --seeds 1 2 3": "with and without the curriculum"},
    "versus": {
        "python -m rl versus configs/one_turn.toml": "synchronous against asynchronous",
        "python -m rl versus configs/one_turn.toml --arms async --beside runs/other": "another trainer's run",
    },
    "measure": {
        "python -m rl measure configs/one_turn.toml runs/one_turn/async-1": "what a run had learned when",
    },
    "packing": {"python -m rl packing --rounds 3": "what shared prompts save"},
}


class Parser(argparse.ArgumentParser):
    """One whose complaint is one line that says where help is."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_examples(commands: Any) -> None:
    """Ends the help of every command with its examples."""
    for name, parser in commands.choices.items():
        examples = EXAMPLES[name]
        width = max(map(len, examples))
        parser.epilog = "\n".join(
            ["examples:", *(f"  {typed:{width}}  {why}" for typed, why in examples.items())]
        )
        parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_json(parser: argparse.ArgumentParser, about: str) -> None:
    """The option of a command whose results are kept in its directory."""
    parser.add_argument("--json", action="store_true", help=f"print {about}, and all else on standard error")


def add_json_file(parser: argparse.ArgumentParser) -> None:
    """The option of a command that measures."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write every figure; without FILE to standard output, and tables to standard error",
    )


def prints_json(arguments: argparse.Namespace) -> bool:
    """Whether standard output is for JSON alone."""
    return getattr(arguments, "json", None) in (True, STDOUT)


def check_target(option: str, path: Path | None) -> None:
    """Before hours of measuring. Raises ConfigError where the file that `option` names cannot be written."""
    if path is None or path == STDOUT:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: that is a directory; name a file")


def check_runs(runs: Iterable[Path]) -> None:
    """Raises ConfigError for the first that is no directory."""
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"there is no directory {run}; name that of a run")


def write_json(target: Path, text: str) -> None:
    """To a file, or to standard output. Raises OSError."""
    if target == STDOUT:
        sys.stdout.write(text)
    else:
        target.write_text(text)
