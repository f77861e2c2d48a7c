"""Every block of the README and the documentation does what it says, page by page, as typed by a reader.

A block that stands below `<!-- not run: why -->` is not run, one below `<!-- background -->` goes on until
the page ends, as in a terminal of its own. Pages that start no daemon find one running.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rl.config
from sandboxd import cli
from sandboxd.config import Config
from tests.sandboxd.page_kit import free_port
from tests.source_tree import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "images" / "README.md"]
BLOCK = re.compile(
    r"(?:<!-- (not run: [^>]+|background) -->\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
SECONDS = 100
# As many as a test machine can spare beside other tests, and a port that is free there.
INSTEAD = {
    "--count 960": "--count 24",
    "--count 96": "--count 24",
    "127.0.0.1:8080": f"127.0.0.1:{free_port()}",
}


class Block(NamedTuple):
    mark: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Those with a language; the others are pictures."""
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def shell(block: Block) -> str:
    """What to type for it."""
    if block.language == "python":
        return f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK\n"
    return fitted(block.text)


def fitted(text: str) -> str:
    """As it can be run beside other tests."""
    for written, run in INSTEAD.items():
        text = text.replace(written, run)
    return text


@contextlib.contextmanager
def background(text: str, directory: Path, environment: dict[str, str]) -> Iterator[None]:
    """Runs from its first line on standard output until the block ends, by SIGTERM, with 0."""
    command = ["bash", "-c", f"exec {text.split('#', maxsplit=1)[0].strip()}"]
    process = subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE)
    assert process.stdout
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(SECONDS), f"{text!r} said nothing"
        assert process.stdout.readline(), f"{text!r} has ended"
        yield
    finally:
        process.terminate()
        process.stdout.close()
        ended = process.wait(SECONDS)
    assert ended == 0, text


def place(tmp_path: Path) -> dict[str, str]:
    """A directory as a checkout after `make .venv`, with nothing of this user in its surroundings."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    run = tmp_path / "run"
    run.mkdir()
    own = {"XDG_RUNTIME_DIR": str(run), "XDG_DATA_HOME": str(run), "SANDBOXD_IMAGES_DIR": str(run / "images")}
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    passed = {key: value for key, value in os.environ.items() if not key.startswith("SANDBOXD")}
    return {**passed, **own, "PATH": path, "PYTHONPATH": f"{ROOT}:{tmp_path}"}


def runnable(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.language in ("console", "python") and not block.mark.startswith("not run")
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the pages' default backend is Linux's")
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.stem)
def test_a_page_works_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    if "busybox" in page.read_text() and not shutil.which("busybox"):
        pytest.skip("no busybox here")
    environment = place(tmp_path)
    todo = runnable(page)
    if not any(block.mark == "background" for block in todo):
        todo.insert(0, Block("background", "console", "sandboxd serve"))
    with contextlib.ExitStack() as stack:
        for block in todo:
            if block.mark == "background":
                stack.enter_context(background(fitted(block.text), tmp_path, environment))
                continue
            done = subprocess.run(
                ["bash", "-eu", "-o", "pipefail", "-c", shell(block)],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr
            assert done.stdout or block.language != "python", block.text


def test_settings_in_the_documentation_are_ones(tmp_path: Path) -> None:
    found = [block.text for page in PAGES for block in blocks(page) if block.language == "toml"]
    assert found
    for text in found:
        values = tomllib.loads(text)
        model = Config if values.keys() <= Config.model_fields.keys() else rl.config.Config
        model.model_validate(values)


def test_every_block_has_a_language_that_something_checks() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in ("console", "python", "toml", "ini", "json", "yaml"), (
                f"{page.name}: {block}"
            )


def test_units_of_a_supervisor_are_read_and_start_what_there_is() -> None:
    found = [block.text for page in PAGES for block in blocks(page) if block.language == "ini"]
    assert found
    for text in found:
        unit = configparser.ConfigParser(interpolation=None)
        unit.read_string(text)
        program, *arguments = shlex.split(unit["Service"]["ExecStart"])
        assert Path(program).name == "sandboxd"
        assert cli._parser().parse_args(arguments).part == "serve"
