"""Every command of the command line: its help, its complaints, and what it prints for programs."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd import SyncClient, cli
from sandboxd.examples import EXAMPLES, leaves
from tests.source_tree import ROOT

from .conftest import daemon_process

POOLS = '[pools.python]\nbackend = "fake"\nwarm = 2\n'
POOLS += '[pools.broken]\nbackend = "fake"\nwarm = 0\nsetup = ["false"]\n'
# They print a line for a person, and a script.
NO_JSON = {"serve", "completion"}
ESCAPE = "\x1b["
COLOUR = re.compile(r"\x1b\[(?:\d;)?3\d")


def commands() -> dict[str, argparse.ArgumentParser]:
    """Those that do something, by their words."""
    found = dict(leaves(cli._parser()))
    return {words: parser for words, parser in found.items() if not dict(leaves(parser))}


COMMANDS = commands()


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def example(words: str) -> list[str]:
    """The arguments of its first example."""
    return shlex.split(next(iter(EXAMPLES[words])))[1:]


def told(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(each) for each in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with daemon_process(tmp_path_factory.mktemp("daemon"), POOLS) as address:
        yield address


def test_every_command_has_examples_that_can_be_typed() -> None:
    parser = cli._parser()
    known = dict(leaves(parser))
    assert set(EXAMPLES) == set(known)
    for words, examples in EXAMPLES.items():
        for typed in examples:
            assert typed.startswith(f"sandboxd {words}"), typed
            assert parser.parse_args(shlex.split(typed)[1:]).run
            assert typed in known[words].format_help()


@pytest.mark.parametrize("words", COMMANDS)
def test_what_prints_data_prints_it_for_programs_too(words: str) -> None:
    assert ("--json" in options(COMMANDS[words])) is (words not in NO_JSON)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_complaint_is_one_line_that_says_where_help_is(words: str) -> None:
    code, out, err = told(*words.split(), "--frobnicate")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("sandboxd")
    assert re.search(r"; see sandboxd( [a-z]+)* --help\n$", err)


ASKING = [words for words, parser in COMMANDS.items() if "--address" in options(parser)]


@pytest.mark.parametrize("words", ASKING)
def test_no_daemon_is_one_line_that_says_what_to_do(words: str, tmp_path: Path) -> None:
    count = len(words.split())
    typed = [word for word in example(words)[count:] if word != "--json"]
    if "--address" in typed:
        del typed[typed.index("--address") :][:2]
    code, out, err = told(*words.split(), "--address", f"unix:{tmp_path}/none", *typed)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "no daemon answers" in err
    assert "start one with `sandboxd serve`, or name another with --address" in err


def documented() -> dict[str, set[str]]:
    """The keys of each command by docs/commands.md."""
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| (.*) \|$", page, re.MULTILINE)
    keys: dict[str, set[str]] = {}
    for command, cell in rows:
        same = re.match(r"as of `([^`]+)`$", cell)
        plain = re.sub(r"\([^)]*\)", "", cell)
        keys[command] = keys[same[1]] if same else set(re.findall(r"`(\w+)`", plain))
    return keys


def printed(*arguments: object) -> list[dict[str, object]]:
    """The objects of a command that has --json."""
    code, out, err = told(*arguments, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def root_file_system(path: Path) -> Path:
    file = tarfile.TarInfo("bin/true")
    with tarfile.open(path, "w") as archive:
        archive.addfile(file)
    return path


def test_the_keys_are_those_of_the_documentation(address: str, tmp_path: Path) -> None:
    there = ("--address", address)
    code, _, err = told("exec", *there, "broken", "--", "true")
    assert code == 1
    assert err.startswith("sandboxd: START_FAILED: ")
    assert err.endswith("; `sandboxd inspect --failures` has its last lines\n")
    name = printed("ls", *there)[0]["name"]
    images = ("--images-dir", tmp_path / "images")
    source = root_file_system(tmp_path / "root.tar")
    shown = {
        "ls": printed("ls", *there),
        "inspect NAME": printed("inspect", *there, name),
        "inspect --failures": printed("inspect", *there, "--failures"),
        "pool ls": printed("pool", "ls", *there),
        "pool set": printed("pool", "set", *there, "python", "--warm", "2"),
        "prewarm": printed("prewarm", *there, "python", "1"),
        "top": printed("top", *there, "--once"),
        "image import": printed("image", "import", source, "--name", "mine", *images),
        "image ls": printed("image", "ls", *images),
        "image rm": printed("image", "rm", "mine", *images),
        "image gc": printed("image", "gc", *images),
    }
    code, out, _ = told("exec", "--json", *there, "python", "--", "true")
    shown["exec"] = [json.loads(out)]
    code, out, _ = told("reload", *there, "--json")
    shown["reload"] = [json.loads(out)]
    code, out, _ = told("doctor", "--count", "1", "--json", "--state-dir", tmp_path / "state")
    shown["doctor"] = [json.loads(out)]
    keys = documented()
    assert set(shown) == set(keys)
    for command, objects in shown.items():
        assert objects, command
        for each in objects:
            assert (command, set(each)) == (command, keys[command])


def test_exec_tells_a_program_how_a_command_ended_and_what_it_printed(address: str) -> None:
    ask = ("exec", "--json", "--address", address)
    code, out, err = told(*ask, "python", "--", "sh", "-c", "echo said; printf '\\377' >&2; exit 3")
    (end,) = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (1, "")
    assert (end["reason"], end["exit_code"], end["stdout"], end["stderr"]) == (
        "EXITED",
        3,
        "said\n",
        "\ufffd",
    )
    code, out, _ = told(*ask, "python", "--", "head", "-c", "3000000", "/dev/zero")
    end = json.loads(out)
    assert (code, end["stdout_dropped"] + len(end["stdout"]), end["stderr_dropped"]) == (0, 3_000_000, 0)
    code, out, _ = told(*ask, "--timeout", "0.1", "python", "--", "sleep", "9")
    assert (code, json.loads(out)["reason"]) == (1, "TIMED_OUT")
    code, out, err = told(*ask, "-i", "python", "--", "cat")
    assert (code, out, err.count("\n")) == (2, "", 1)


def on_terminal(*arguments: str, **environ: str) -> str:
    ours, theirs = pty.openpty()
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "sandboxd", *arguments]
    with subprocess.Popen(
        command, stdout=theirs, env={**clean, "TERM": "xterm-256color", **environ}
    ) as process:
        os.close(theirs)
        said = b""
        # Its end is an error of the terminal.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 4096):
                said += piece
    os.close(ours)
    assert process.returncode == 0
    return said.decode()


def test_colours_are_for_terminals_and_for_who_wants_them(address: str) -> None:
    once = ("top", "--once", "--address", address)
    assert COLOUR.search(on_terminal(*once))
    narrow = on_terminal(*once, NO_COLOR="1", COLUMNS="80")
    assert not COLOUR.search(narrow)
    # No title is cut short in as few columns as terminals have.
    assert "OLDEST" in narrow
    for command in (once, ("ls", "--address", address), ("pool", "ls", "--address", address)):
        code, out, _ = told(*command)
        assert (code, ESCAPE in out) == (0, False)


def test_what_callers_wrote_is_no_markup_and_stays_in_its_line(address: str) -> None:
    with SyncClient(address) as client, client.acquire("python", labels={"note": "[red]x[/]" * 8}):
        code, out, _ = told("ls", "--address", address)
    assert code == 0
    (row,) = [line for line in out.splitlines() if " ACTIVE " in line]
    assert f"note={'[red]x[/]' * 8}" in row
