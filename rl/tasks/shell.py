"""Work on files with a shell, in several steps: the answer is the state in which the sandbox is left."""

from __future__ import annotations

import json
import random

from rl.boxes import Box
from rl.dialogue import PromptStyle, Shot
from rl.tasks.base import Problem
from rl.tasks.sandboxed import SHELL, Rules, Sandboxed, read_text
from rl.tasks.vocabulary import WORDS
from rl.types import Task

Files = dict[str, str]
Gone = dict[str, str | None]
"""Path → content as it must be, None where nothing may be left."""

SHOT = Shot(
    (
        "Write the number of lines of notes/a.txt to lines.txt. Then delete notes/a.txt.",
        "```sh\nwc -l < notes/a.txt > lines.txt; cat lines.txt\n```",
        "Output: 4",
        "```sh\nrm notes/a.txt\n```",
        "Output: nothing was printed",
        "Done.",
    )
)


class Shell(Sandboxed):
    """`prepare` lays files out; 1.0 when every file is as it must be (but for white space at its end)."""

    name = "shell"
    levels = ("one file", "a sum over files", "sort files into directories", "totals by name, then clean up")
    rules = Rules(
        style=PromptStyle(
            system="Do the work with shell commands, one block at a time. When it is done, say: Done.",
            shots=(SHOT,),
            opening="```sh\n",
            languages=("sh", "bash"),
        ),
        program=SHELL,
        answer="state",
    )

    def make(self, level: int, rng: random.Random) -> Problem:
        question, before, after = (one_file, sum_over, sort_out, totals)[level](rng)
        return Problem(question, json.dumps({"before": before, "after": after}))

    async def prepare(self, task: Task, box: Box) -> None:
        for path, text in json.loads(task.answer)["before"].items():
            await box.write_file(path, text.encode())

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        for path, wanted in json.loads(task.answer)["after"].items():
            found = await read_text(box, path)
            if (found if found is None else found.rstrip()) != wanted:
                return 0.0
        return 1.0


def one_file(rng: random.Random) -> tuple[str, Files, Gone]:
    directory, name, word = rng.sample(WORDS, 3)
    path = f"{directory}/{name}.txt"
    return f"Make the file {path} with the one line: hello {word}", {}, {path: f"hello {word}"}


def sum_over(rng: random.Random) -> tuple[str, Files, Gone]:
    numbers = {f"data/{name}.txt": rng.randint(2, 99) for name in rng.sample(WORDS, rng.randint(3, 6))}
    target = f"{rng.choice(WORDS)}.txt"
    question = f"Each file in data holds one number. Write their sum to {target}."
    return question, {path: f"{n}\n" for path, n in numbers.items()}, {target: str(sum(numbers.values()))}


def sort_out(rng: random.Random) -> tuple[str, Files, Gone]:
    mark, directory, *names = rng.sample(WORDS, rng.randint(6, 8))
    marked = set(rng.sample(names, 2))
    texts = {
        name: f"{mark if name in marked else rng.choice(names)}\n{rng.choice(WORDS)}\n" for name in names
    }
    question = (
        f"Move each file of inbox whose first line is {mark} to the directory {directory}. "
        "Then delete the other files of inbox."
    )
    after: Gone = {f"inbox/{name}": None for name in names}
    after |= {f"{directory}/{name}": texts[name].rstrip() if name in marked else None for name in names}
    return question, {f"inbox/{name}": text for name, text in texts.items()}, after


def totals(rng: random.Random) -> tuple[str, Files, Gone]:
    names, stems = rng.sample(WORDS, 3), rng.sample(WORDS, 2)
    before, sums = {}, dict.fromkeys(names, 0)
    for stem in stems:
        rows = [(rng.choice(names), rng.randint(1, 50)) for _ in range(4)]
        before[f"data/{stem}.csv"] = "".join(f"{name},{amount}\n" for name, amount in rows)
        for name, amount in rows:
            sums[name] += amount
    lines = [f"{name} {amount}" for name, amount in sorted(sums.items()) if amount]
    target = f"{rng.choice(WORDS)}.txt"
    question = (
        f"The files data/*.csv hold lines of name,amount. Write to {target} one line for each name, sorted "
        "by name: the name, a space, the sum of its amounts. Then delete the files."
    )
    return question, before, {target: "\n".join(lines), **dict.fromkeys(before)}
