"""What the documentation types and no test runs (test_doc_blocks.py runs the rest) can be typed at least."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.cli import parser as rl_parser
from sandboxd import cli
from sandboxd.examples import leaves
from tests.source_tree import ROOT
from tests.test_doc_blocks import PAGES, blocks

# What is said of the past may name what is gone.
PRESENT = [page for page in [*PAGES, ROOT / "CONTRIBUTING.md"] if page.name != "log.md"]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
PROGRAMS = {"sandboxd": cli._parser(), "python -m rl": rl_parser()}
# Other people's, and what every shell has.
FOREIGN = {"curl", "docker", "echo", "export", "mmdebstrap", "nsenter", "vllm", "xargs"}


def typed(page: Path) -> Iterator[list[str]]:
    """The words of each command in its blocks that are not run."""
    for block in blocks(page):
        if block.language == "console" and block.mark.startswith("not run"):
            for line in block.text.replace("\\\n", " ").splitlines():
                rest = shlex.split(line, comments=True)
                while rest:
                    end = rest.index("|") if "|" in rest else len(rest)
                    words, rest = rest[:end], rest[end + 1 :]
                    while words and re.match(r"[A-Z_]+=", words[0]):
                        del words[0]
                    if words:
                        yield words


def check(words: list[str]) -> None:
    """Raises SystemExit or AssertionError for what cannot be typed."""
    first = words[0].removeprefix(".venv/bin/")
    if first == "sandboxd":
        PROGRAMS["sandboxd"].parse_args(words[1:])
    elif words[:3] == ["python", "-m", "rl"]:
        PROGRAMS["python -m rl"].parse_args(words[3:])
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
    elif first == "make":
        goals = [word for word in words[1:] if "=" not in word]
        known = re.findall(r"^([\w.]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(goals) <= set(known)
    elif first not in FOREIGN:
        assert (ROOT / first).is_file()


@pytest.mark.parametrize("page", [page for page in PRESENT if any(typed(page))], ids=lambda page: page.stem)
def test_what_is_not_run_can_be_typed(page: Path) -> None:
    for words in typed(page):
        try:
            check(words)
        except (SystemExit, AssertionError) as error:
            raise AssertionError(f"{page.name}: {shlex.join(words)}") from error


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def named(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """What is quoted in prose, the command that it names, and which options of that command it names."""
    for quoted in INLINE.findall(FENCED.sub("", text)):
        said = " ".join(quoted.split())
        for program in PROGRAMS:
            if said == program or said.startswith(f"{program} "):
                words = said.partition(" -- ")[0].removeprefix(program)
                yield said, program, set(re.findall(r"(?<=\s)--?[a-z][\w-]*", words))


@pytest.mark.parametrize(
    "page", [page for page in PRESENT if any(named(page.read_text()))], ids=lambda page: page.stem
)
def test_what_prose_names_exists(page: Path) -> None:
    for said, program, wanted in named(page.read_text()):
        known = dict(leaves(PROGRAMS[program]))
        rest = said.removeprefix(program).strip()
        command = next(
            (words for words in sorted(known, key=len, reverse=True) if f"{rest} ".startswith(f"{words} ")),
            "",
        )
        assert command or not rest or rest.startswith("-"), f"{page.name}: {said}: no such command"
        parser = known[command] if command else PROGRAMS[program]
        below = {words: inner for words, inner in known.items() if words.startswith(f"{command} ")}
        everything = options(parser).union(*map(options, below.values()))
        assert wanted <= everything, f"{page.name}: {said}: {wanted - everything}"


def test_no_block_is_hidden_from_the_tests_by_being_indented() -> None:
    for page in [*PRESENT, ROOT / "docs" / "log.md"]:
        plain = FENCED.sub("", page.read_text())
        assert re.findall(r"\n\n((?: {4}|\t).*)", plain) == [], page.name
