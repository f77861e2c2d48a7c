"""`python -m rl packing`: trained tokens a second with shared prompts packed, padded, and one by one."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rl.batching import PackedPass, plan_passes, sample_from_turns
from rl.command_line import add_json_file, check_target, write_json
from rl.config import Config, TrainerConfig, load
from rl.dialogue import Dialogue
from rl.errors import ConfigError
from rl.losses.recipes import Totals
from rl.model import ChatTokenizer, prepare_model
from rl.precision import Precision, resolve
from rl.single_passes import one_by_one, padded_passes
from rl.tasks import TaskSource, shipped_families
from rl.types import Batch, PackedGroup, Task, Turn, VersionSpan

if TYPE_CHECKING:
    from rl.trainer import TorchTrainer

CODE = ("print({0})\n```", "a = {0}\nprint(a)\n```", "x = {0}\ny = x\nprint(y)\n```")
WRONG = ("{0}\n```", "print({0} + 1)\n```", "result = {0}\nprint(result)  # the result\n```")
LOGPROB = -0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of computing a batch: passes, tokens computed, and seconds of its fastest round, by the clock
    and of the processors."""

    how: str
    passes: int
    computed: int
    seconds: float
    processor_seconds: float
    trained: int

    @property
    def rate(self) -> float:
        """Trained tokens a second."""
        return self.trained / self.seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """How to measure: each way in so many `rounds`."""

    config: TrainerConfig
    precision: Precision
    rounds: int


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "packing",
        help="measure what packing shared prompts saves the trainer",
        description="Computes loss and gradient of one batch in three ways, all with the same result: "
        "packed with shared prompts computed once, padded to the longest, and one sample at a time.",
    )
    parser.add_argument("config", type=Path, nargs="?", help="TOML file of settings, as for train")
    parser.add_argument("--rounds", type=int, default=3, help="of each way, by turns (default 3)")
    add_json_file(parser)


def packing(arguments: argparse.Namespace, console: Console) -> list[Measured]:
    """Measures, prints a table, and writes the figures where asked. Raises ConfigError."""
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds = {arguments.rounds}: at least one must be measured")
    check_target("--json", arguments.json)
    config = load(arguments.config, {})
    model_path = prepare_model(config.model, config.models_dir)
    # Not before: it takes seconds to load, and what is wrong is said at once.
    from rl.trainer import TorchTrainer

    precision = resolve(config.precision)
    batch = example_batch(config, model_path)
    trainer = TorchTrainer.load(model_path, config.trainer, precision)
    trainer.warm_up()
    found = measure(trainer, batch, Asked(config.trainer, precision, arguments.rounds))
    console.print(_table(found, batch, precision))
    if arguments.json is not None:
        figures = [asdict(each) | {"trained_tokens_s": each.rate} for each in found]
        content = {"precision": precision, "ways": figures}
        write_json(arguments.json, json.dumps(content, indent=2) + "\n")
    return found


def example_batch(config: Config, model_path: Path) -> Batch:
    """A batch like those of a run: its families' first two levels, its prompts, and for every sample a call
    of Python such as the model makes, what it printed, and an answer. The same for the same seed."""
    shipped = shipped_families()
    unknown = [name for name in config.families if name not in shipped]
    if unknown:
        raise ConfigError(f"families = {unknown}: packing is measured on built-in ones: {', '.join(shipped)}")
    names = config.families or ["sums", "words", "letters"]
    source = TaskSource(shipped[name] for name in names)
    dialogue = Dialogue(ChatTokenizer(model_path))
    rng = random.Random(f"packing/{config.seed}")
    groups = []
    for number in range(config.groups_per_batch):
        task = source.train(names[number % len(names)], number // len(names) % 2, number)
        samples = tuple(
            sample_from_turns(_turns(task, dialogue, rng, solved=index % 2 == 0), 1.0 - 2.0 * (index % 2))
            for index in range(config.samples_per_group)
        )
        groups.append(PackedGroup(task.key, dialogue.prompt(task.question), samples))
    return Batch(1, tuple(groups))


def _turns(task: Task, dialogue: Dialogue, rng: random.Random, *, solved: bool) -> tuple[Turn, Turn]:
    tokenizer = dialogue.tokenizer
    answer = task.answer if solved else str(rng.randint(0, 99))
    expression = f"{rng.randint(1, 99)} + {rng.randint(1, 99)}"
    code = tokenizer.encode(rng.choice(CODE if solved else WRONG).format(expression))
    called = np.array(code, np.int32)
    reply = np.array([*tokenizer.encode(answer), tokenizer.end_of_turn], np.int32)
    observed = dialogue.observation(called, f"Output: {answer}")
    return _turn(called, observed), _turn(reply, observed[:0])


def _turn(sampled: np.ndarray, observed: np.ndarray) -> Turn:
    count = len(sampled)
    return Turn(sampled, np.full(count, LOGPROB, np.float32), (VersionSpan(0, 0, count),), observed)


def measure(trainer: TorchTrainer, batch: Batch, asked: Asked) -> list[Measured]:
    """Every way in each round, by turns, so that a busy minute falls on all of them."""
    totals = Totals(batch.trained_count, batch.sample_count)
    ways: dict[str, Callable[[], tuple[int, int]]] = {
        "packed": lambda: _packed(trainer, plan_passes(batch.groups, asked.config.max_pass_tokens), totals),
        "padded": lambda: _padded(trainer, batch, asked),
        "one by one": lambda: _packed(trainer, one_by_one(batch.groups), totals),
    }
    found: dict[str, Measured] = {}
    for _ in range(asked.rounds):
        for how, way in ways.items():
            began, cpu = time.perf_counter(), time.process_time()
            passes, computed = way()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            trainer.model.zero_grad(set_to_none=False)
            best = found.get(how, Measured(how, passes, computed, seconds, cpu, batch.trained_count))
            found[how] = replace(
                best,
                seconds=min(best.seconds, seconds),
                processor_seconds=min(best.processor_seconds, cpu),
            )
    return list(found.values())


def _packed(trainer: TorchTrainer, passes: Iterable[PackedPass], totals: Totals) -> tuple[int, int]:
    """Returns passes and tokens computed."""
    lengths = []
    for packed in passes:
        trainer.accumulate(packed, totals)
        lengths.append(len(packed.ids))
    return len(lengths), sum(lengths)


def _padded(trainer: TorchTrainer, batch: Batch, asked: Asked) -> tuple[int, int]:
    from rl.padding import Padded, plain_attention

    padded = Padded(trainer.model, asked.config.objective, asked.precision)
    totals = Totals(batch.trained_count, batch.sample_count)
    passes = list(padded_passes(batch.groups, asked.config.max_pass_tokens))
    with plain_attention(trainer.model):
        return len(passes), sum(padded.accumulate(chosen, totals) for chosen in passes)


def _table(found: list[Measured], batch: Batch, precision: str) -> Table:
    count = len(batch.groups[0].samples)
    table = Table(
        title=f"Loss and gradient of {len(batch.groups)} groups of {count} samples, {precision}, "
        f"{batch.trained_count} trained tokens; without the optimiser's step"
    )
    columns = ("", "passes", "tokens computed", "s", "processor s", "trained tokens/s", "packed is faster")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for each in found:
        table.add_row(
            each.how,
            str(each.passes),
            f"{each.computed:,}",
            f"{each.seconds:.2f}",
            f"{each.processor_seconds:.2f}",
            f"{each.rate:.1f}",
            f"{found[0].rate / each.rate:.2f} times",
        )
    return table
