"""Every command of `python -m rl`: its help, its complaints, and what it prints for programs."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from rl.cli import main, parser
from rl.command_line import EXAMPLES
from sandboxd.examples import leaves

COMMANDS = dict(leaves(parser()))


def test_every_command_has_examples_that_can_be_typed() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    for name, examples in EXAMPLES.items():
        for typed in examples:
            assert typed.startswith(f"python -m rl {name}")
            assert parser().parse_args(shlex.split(typed)[3:]).command == name
            assert typed in COMMANDS[name].format_help()


@pytest.mark.parametrize("name", COMMANDS)
def test_what_prints_data_prints_it_for_programs_too(name: str) -> None:
    assert any("--json" in action.option_strings for action in COMMANDS[name]._actions)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_complaint_is_one_line_that_says_where_help_is(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--frobnicate"])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert re.search(r"^python -m rl.*; see python -m rl( [a-z]+)? --help\n$", err)


def test_figures_on_standard_output_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "--memory", "20", "--json"])
    out, err = capsys.readouterr()
    assert f"{json.loads(out)['memory']['episodes']} episodes" in err
