"""Tasks that are judged in the sandbox: human-eval, the shell, and the one that docs/rl.md shows."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path

import pytest

from rl.dialogue import Dialogue
from rl.generators.fake import ByteTokenizer
from rl.rollout import Limits, Rollout
from rl.sandboxes import DaemonSandboxes
from rl.tasks import AnyFamily, TaskSource, UnknownFamily, is_held_out, load_family, shipped_families
from rl.tasks.human_eval import HumanEval, read_problems
from rl.tasks.shell import Shell
from rl.types import Episode, Scored, StopReason, Task, Truncated, Unscored
from tests.rl.box_kit import fake_sandboxes
from tests.rl.test_rollout import Recorder

LIMITS = Limits(max_turns=4, turn_tokens=4000, context_tokens=40_000)
DIALOGUE = Dialogue(ByteTokenizer())
DOCS = Path(__file__).parents[2] / "docs" / "rl.md"


async def attempt(sandboxes: DaemonSandboxes, family: AnyFamily, task: Task, *turns: str) -> Episode:
    rollout = Rollout(Recorder(*turns), sandboxes, DIALOGUE, TaskSource([family]), limits=LIMITS)
    return await rollout.run(task)


def play(tmp_path: Path, family: AnyFamily, task: Task, *turns: str) -> Episode:
    async def body() -> Episode:
        async with fake_sandboxes(tmp_path) as sandboxes:
            return await attempt(sandboxes, family, task, *turns)

    return asyncio.run(body())


def problem(task_id: str) -> tuple[Task, str]:
    """A HumanEval task and its solution."""
    for task, row in zip(TaskSource([HumanEval()]).all_of("human_eval"), read_problems(), strict=True):
        if row["task_id"] == task_id:
            return task, row["prompt"] + row["canonical_solution"]
    raise AssertionError(task_id)


def test_human_eval_is_whole() -> None:
    tasks = TaskSource([HumanEval()]).all_of("human_eval")
    assert len({task.key for task in tasks}) == len({task.question for task in tasks}) == 164
    row = json.loads(tasks[0].answer)
    assert row["entry_point"] == "has_close_elements"
    assert "canonical_solution" not in row, "what the sandbox gets does not hold the solution"
    source = TaskSource([HumanEval()])
    assert not is_held_out(source.train("human_eval", 0, 1).question)
    assert is_held_out(source.held_out("human_eval", 0, 1).question)


def test_the_solution_passes_the_tests_in_the_sandbox_and_ends_the_episode(tmp_path: Path) -> None:
    task, solution = problem("HumanEval/0")
    episode = play(tmp_path, HumanEval(), task, f"{solution.strip()}\n```")
    assert episode.outcome == Scored(1.0)
    assert episode.stop_reason is StopReason.TOOL_STOPPED
    assert len(episode.turns) == 1


@pytest.mark.parametrize(
    "code",
    [
        "def has_close_elements(numbers, threshold):\n    return True\n",
        "def has_close_elements(numbers, threshold):\n    import os; os._exit(0)\n",
        "import sys; sys.exit(0)\n",
        "def has_close_elements(:\n",
        "raise SystemExit('\0')\n",
    ],
    ids=["wrong", "exits", "leaves", "no Python", "zero byte"],
)
def test_wrong_code_earns_nothing_however_it_ends(tmp_path: Path, code: str) -> None:
    assert play(tmp_path, HumanEval(), problem("HumanEval/0")[0], f"{code}```").outcome == Scored(0.0)


def test_a_right_answer_whose_sandbox_dies_at_the_verdict_is_unscored(tmp_path: Path) -> None:
    """The first command of such an episode is that of its verifier."""
    task, solution = problem("HumanEval/0")

    async def body() -> Episode:
        async with asyncio.timeout(30), fake_sandboxes(tmp_path, faults=["die 1"]) as sandboxes:
            return await attempt(sandboxes, HumanEval(), task, f"{solution.strip()}\n```")

    episode = asyncio.run(body())
    assert isinstance(episode.outcome, Unscored), episode.outcome
    assert episode.outcome.kind == "SANDBOX_LOST"
    assert episode.reward is None
    assert len(episode.turns) == 1


def test_a_solution_may_lean_on_what_the_problem_gives(tmp_path: Path) -> None:
    """HumanEval/38 defines a helper before the function that is asked for."""
    row = next(row for row in read_problems() if row["task_id"] == "HumanEval/38")
    alone = f"def {row['entry_point']}(s: str):\n{row['canonical_solution']}"
    assert "encode_cyclic" in alone
    assert play(tmp_path, HumanEval(), problem("HumanEval/38")[0], f"{alone}```").outcome == Scored(1.0)


SHELL_WORK = (
    ("mkdir -p {0}\n```", "```sh\necho 'hello {2}' > {0}/{1}.txt\n```\n"),
    ("cat data/*.txt\n```", "```sh\ncat data/*.txt | awk '{{s+=$1}} END {{print s}}' > {0}.txt\n```\n"),
    (
        "mkdir -p {1}\n```",
        '```sh\nfor f in inbox/*; do read w < $f; [ "$w" = {0} ] && mv $f {1}/; done; rm inbox/*\n```\n',
    ),
    (
        "awk -F, '{{s[$1]+=$2}} END {{for (n in s) print n, s[n]}}' data/*.csv | sort > {0}.txt\n```",
        "```bash\nrm data/*.csv\n```\n",
    ),
)
ASKED = (
    r"file (\w+)/(\w+)\.txt .* hello (\w+)",
    r"sum to (\w+)\.txt",
    r"first line is (\w+) to the directory (\w+)",
    r"Write to (\w+)\.txt",
)


@pytest.mark.parametrize("level", range(len(Shell.levels)))
def test_shell_work_is_judged_by_what_it_leaves(tmp_path: Path, level: int) -> None:
    source = TaskSource([Shell()])

    async def body() -> None:
        async with fake_sandboxes(tmp_path) as sandboxes:
            for seed in range(2):
                task = source.train("shell", level, seed)
                found = re.search(ASKED[level], task.question)
                assert found is not None, task.question
                first, second = (turn.format(*found.groups()) for turn in SHELL_WORK[level])
                done = await attempt(sandboxes, Shell(), task, first, second, "Done.")
                assert (done.outcome, done.stop_reason) == (Scored(1.0), StopReason.COMPLETED)
                half = await attempt(sandboxes, Shell(), task, first, "Done.")
                assert half.outcome == Scored(0.0)

    asyncio.run(body())


def test_the_state_counts_also_where_a_limit_ends_the_episode(tmp_path: Path) -> None:
    task = TaskSource([Shell()]).train("shell", 0, 0)
    found = re.search(ASKED[0], task.question)
    assert found is not None
    first, second = (turn.format(*found.groups()) for turn in SHELL_WORK[0])
    again = "```sh\nls\n```\n"
    episode = play(tmp_path, Shell(), task, first, second, again, again)
    assert episode.outcome == Truncated(StopReason.MAX_TURNS, 1.0)


@pytest.mark.parametrize("level", range(len(Shell.levels)))
def test_a_sandbox_left_alone_solves_no_shell_task(level: int) -> None:
    for seed in range(20):
        made = json.loads(Shell().make(level, random.Random(seed)).answer)
        assert any(made["before"].get(path) != text for path, text in made["after"].items())


def test_families_judged_in_the_sandbox_are_not_trained_on_unless_named() -> None:
    assert {"human_eval", "shell"} <= set(shipped_families())
    with pytest.raises(UnknownFamily, match="judged in the sandbox"):
        TaskSource([Shell()]).verify(TaskSource([Shell()]).train("shell", 0, 0), "Done.")


def test_the_task_that_the_docs_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = DOCS.read_text().partition("## A task of your own")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    assert 10 < len(code.splitlines()) <= 30
    (tmp_path / "my_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    family = load_family("my_task:Repair")
    task = TaskSource([family]).train("repair", 0, 5)
    turns = (
        "text = open('main.py').read()\nopen('main.py', 'w').write(text.replace('-', '+'))\n```",
        "I repaired it.",
    )
    assert play(tmp_path, family, task, *turns).outcome == Scored(1.0)
    assert play(tmp_path, family, task, "print(1)\n```", "I repaired it.").outcome == Scored(0.0)
