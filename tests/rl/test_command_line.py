"""Every command of `python -m rl`: its help, its complaints, and what it prints for programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rl.cli import main, parser
from rl.command_line import EXAMPLES
from rl.config import load
from sandboxd.examples import leaves
from tests.source_tree import ROOT

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


REHEARSAL = """
name = "file"
runs_dir = "{folder}"
seed = 1
steps = 50
families = ["sums"]
groups_per_batch = 1
samples_per_group = 4
staleness_bound = 2
checkpoint_every_steps = 1
checkpoints_kept = 3
[trainer]
backend = "fake"
[generator]
backend = "fake"
[sandboxes]
backend = "fake"
warm = 2
[heldout]
per_kind = 1
per_level = 1
"""


def documented() -> set[str]:
    """The metrics that docs/rl.md explains; a word in capitals stands for any."""
    page = (ROOT / "docs" / "rl.md").read_text()
    rates = page.partition("## Matching rates")[2].partition("\n\nEpisodes at")[0]
    others = page.partition("Of `metrics.jsonl`, beside")[2]
    cells = [line.split(" | ")[0] for line in f"{rates}\n{others}".splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([a-zA-Z0-9_/]+)`", "".join(cells))) | {"queue/late_share", "queue/length_bias"}


def named_in_source() -> set[str]:
    """What looks like the name of a metric there, its variable parts as words in capitals."""
    prefixes = (
        "buffer|concurrency|curriculum|groups|inference|loop|off_policy|perf|queue|rollout|sandbox|time|train"
    )
    found = set()
    for file in (ROOT / "rl").glob("*.py"):
        for name in re.findall(rf'"((?:{prefixes})/[a-z_]+)"', file.read_text()):
            found.add(name)
    # Of a latency, which has a median and a maximum.
    return found - {"sandbox/acquire"}


def test_every_metric_is_explained() -> None:
    unexplained = {name for name in named_in_source() if not is_explained(name)}
    assert unexplained == set()


def is_explained(name: str) -> bool:
    patterns = (re.sub(r"[A-Z]+", r"[^/]+", each) for each in documented())
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def test_options_of_train_win_over_the_file_and_hold(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal without a model; what it keeps is what was asked for."""
    file = tmp_path / "rehearsal.toml"
    file.write_text(REHEARSAL.format(folder=tmp_path / "elsewhere"))
    options = ["--name", "line", "--seed", "7", "--steps", "5", "--time-limit", "300"]
    options += ["--sync", "--no-filter", "--json"]
    assert main(["train", str(file), *options, "--runs-dir", str(tmp_path)]) == 0
    run = tmp_path / "line"
    kept = load(run / "config.toml", {})
    assert (kept.name, kept.seed, kept.steps, kept.time_limit_seconds) == ("line", 7, 5, 300.0)
    assert (kept.staleness_bound, kept.filter, kept.runs_dir) == (0, False, tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row.get("off_policy/max", 0.0) for row in rows) == 0
    # New weights stop the generator, for no longer than it takes to publish them.
    assert all(0 < row["time/paused"] <= row["time/publish"] for row in rows)
    assert not any("curriculum/open/sums" in row for row in rows)
    written = {name for row in rows for name in row}
    assert {name for name in written if not is_explained(name)} == set()
    rates = (
        (ROOT / "docs" / "rl.md").read_text().partition("## Matching rates")[2].partition("Episodes at")[0]
    )
    assert set(re.findall(r"`([a-z]+/\w+)`", rates)) - written == set()
    saved = {path.name for path in (run / "checkpoints").iterdir()}
    assert saved == {"step-000003", "step-000004", "step-000005"}
    assert json.loads(capfd.readouterr().out)["seed"] == 7


WRONG_PATHS = """
import sys
from rl.cli import main
for line in sys.stdin.read().splitlines():
    print(main(line.split()))
print(sorted({"torch", "transformers", "vllm"} & set(sys.modules)))
"""


def test_paths_that_do_not_exist_are_told_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text("[heldout]\nevery_steps = 1\nweights_every_steps = 1\n")
    (tmp_path / "model.toml").write_text('model = "none/model"\n')
    wrong = {
        "packing none.toml": "cannot read the settings file none.toml",
        "packing good.toml --json none/figures.json": "--json none/figures.json: there is no directory none",
        "packing model.toml": "'none/model' is neither a directory",
        "train none.toml": "cannot read the settings file none.toml",
        "study none.toml": "cannot read the settings file none.toml",
        "study good.toml --json none/figures.json": "--json none/figures.json: there is no directory none",
        "versus none.toml": "cannot read the settings file none.toml",
        "versus good.toml --json none/figures.json": "there is no directory none",
        "versus good.toml --json .": "--json .: that is a directory; name a file",
        "versus good.toml --beside none/run": "there is no directory none/run",
        "measure none.toml .": "cannot read the settings file none.toml",
        "measure good.toml none/run": "there is no directory none/run; name that of a run",
        "report none/run": "there is no directory none/run; name that of a run",
        "bench --json none/figures.json": "there is no directory none",
    }
    done = subprocess.run(
        [sys.executable, "-c", WRONG_PATHS],
        input="\n".join(wrong),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [*["2"] * len(wrong), "[]"], done.stderr
    for words, line in zip(wrong.values(), done.stderr.splitlines(), strict=True):
        assert words in line
