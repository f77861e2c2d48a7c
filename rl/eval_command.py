"""`python -m rl eval`: pass@k of a local model or of any OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from rl import tracing
from rl.attempts import Attempts, Tempered, attempt_all
from rl.byte_tokenizer import ByteTokenizer
from rl.command_line import add_json
from rl.config import Config, endpoint_key, load, traces_protocol
from rl.dialogue import Dialogue
from rl.errors import ConfigError, StarvedError
from rl.generator import Generator
from rl.generators.endpoint import EndpointSettings, open_endpoint
from rl.generators.opening import engine_settings
from rl.generators.vllm import open_vllm
from rl.ledger import Ledger, MeteredGenerator
from rl.model import ChatTokenizer, prepare_model
from rl.player import Player
from rl.precision import resolve
from rl.progress import Progress
from rl.rollout import Limits, Rollout
from rl.run import task_source
from rl.sandboxes import DaemonSandboxes, own_daemon
from rl.session import episode_limits
from rl.tasks import TaskSource
from rl.tasks.source import draw_distinct
from rl.types import Task
from sandboxd import Client

EPISODE = {"max_turns": 6, "turn_tokens": 512, "context_tokens": 4096, "seconds": 600.0}
"""Larger than those of training, which suit short sums: an evaluation is not to cut answers short."""

UNBOUNDED = 1 << 30
"""An endpoint knows the length of its own context."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be measured: `samples` attempts at each of `tasks`, and pass@k for each of `ks`."""

    tasks: tuple[Task, ...]
    samples: int
    ks: tuple[int, ...]
    endpoint: str | None
    temperature: float
    top_p: float


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("eval", help="measure pass@k on tasks; results go to runs/NAME/eval.json")
    parser.add_argument("config", nargs="?", type=Path, help="TOML file of settings, as for train")
    parser.add_argument("--name", default="eval", help="name of the results' directory (default: eval)")
    parser.add_argument(
        "--task", action="append", required=True, metavar="FAMILY", help="a task family; may be repeated"
    )
    parser.add_argument("--tasks", type=int, default=16, metavar="N", help="held-out problems of each level")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="attempts at each problem")
    parser.add_argument("--k", default="1", metavar="K[,K]", help="for which k, each at most --samples")
    parser.add_argument("--endpoint", metavar="URL", help="base of an OpenAI-compatible server (…/v1)")
    parser.add_argument("--model", help="the endpoint's name for it, or a local model as in the settings")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="seed of the engine and of the intervals")
    parser.add_argument("--runs-dir", type=Path, help="where results are kept (default: runs)")
    add_json(parser, "eval.json")


def settings(arguments: argparse.Namespace) -> Config:
    """The settings file with the command line's values over it. Raises ConfigError."""
    overrides: dict[str, object] = {
        "name": arguments.name,
        "seed": arguments.seed,
        "runs_dir": arguments.runs_dir,
        "families": arguments.task,
        "model": None if arguments.endpoint else arguments.model,
        "episode": EPISODE if arguments.config is None else None,
    }
    return load(arguments.config, overrides)


def question(arguments: argparse.Namespace, source: TaskSource) -> Question:
    """Raises ConfigError, UnknownFamily."""
    if arguments.endpoint and not arguments.model:
        raise ConfigError("--endpoint needs --model NAME, as the server calls it")
    if arguments.tasks < 1 or arguments.samples < 1:
        raise ConfigError(f"--tasks {arguments.tasks} --samples {arguments.samples}: both must be at least 1")
    try:
        ks = tuple(sorted({int(part) for part in arguments.k.split(",")}))
    except ValueError as error:
        raise ConfigError(f"--k {arguments.k}: give whole numbers with commas, such as 1,5") from error
    if not 1 <= ks[0] <= ks[-1] <= arguments.samples:
        raise ConfigError(f"--k {arguments.k}: each k must lie in 1 to --samples {arguments.samples}")
    return Question(
        tasks=choose(source, arguments.tasks),
        samples=arguments.samples,
        ks=ks,
        endpoint=arguments.endpoint,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
    )


def choose(source: TaskSource, per_level: int) -> tuple[Task, ...]:
    """A fixed set whole, and of every other family `per_level` held-out problems of each level."""
    return tuple(
        task
        for family, levels in source.levels().items()
        for task in source.all_of(family)
        or [one for level in range(levels) for one in draw_distinct(source, family, level, per_level)]
    )


async def evaluate(arguments: argparse.Namespace, progress: Progress) -> Table:
    """Plays all attempts, writes `eval.json`, returns the table. Raises StarvedError when none is scored."""
    config = settings(arguments)
    source = task_source(config)
    asked = question(arguments, source)
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.exported(traces_protocol(), config.name))
        address = config.sandboxes.address
        if not address:
            progress.say("starting the sandbox daemon")
            address = await stack.enter_async_context(own_daemon(config.sandboxes, config.directory))
        client = await stack.enter_async_context(Client(address))
        await client.get_pool(config.sandboxes.pool)
        opening = open_generator(config, asked, arguments.model, progress)
        generator, dialogue, limits = await stack.enter_async_context(opening)
        ledger = Ledger()
        rollout = Rollout(
            # Within the meter, which refuses such draws in a loop that trains on them.
            MeteredGenerator(Tempered(generator, asked.temperature, asked.top_p), ledger),
            DaemonSandboxes.of(client, config.sandboxes),
            dialogue,
            source,
            limits=limits,
        )
        player = Player(
            rollout,
            ledger,
            concurrent=config.concurrent_episodes,
            episode_seconds=config.episode.seconds,
        )
        progress.say(f"{asked.samples} attempts at each of {len(asked.tasks)} problems")
        attempts = await attempt_all(player, asked.tasks, asked.samples)
        generated = generator.stats().generated_tokens
    ledger.check()
    result = {
        "model": arguments.model or config.model,
        "endpoint": asked.endpoint,
        "families": config.families,
    }
    result |= {"samples": asked.samples, "temperature": asked.temperature, "top_p": asked.top_p}
    result |= {"generated_tokens": generated} | attempts.as_dict(asked.ks, seed=config.seed)
    file = config.directory / "eval.json"
    await asyncio.to_thread(file.write_text, json.dumps(result, indent=2) + "\n")
    _say_losses(result, progress)
    progress.say(f"results: {file}")
    return table(attempts, asked, seed=config.seed)


@asynccontextmanager
async def open_generator(
    config: Config, asked: Question, model: str | None, progress: Progress
) -> AsyncIterator[tuple[Generator, Dialogue, Limits]]:
    """The endpoint or the local engine, how to write for it, and the limits that suit it."""
    limits = episode_limits(config.episode)
    if asked.endpoint is not None:
        endpoint = EndpointSettings(
            asked.endpoint,
            model or "",
            endpoint_key(),
            seconds=config.episode.turn_seconds,
            max_connections=config.concurrent_episodes,
        )
        async with open_endpoint(endpoint) as remote:
            dialogue = Dialogue(ByteTokenizer(), begins_turns=False)
            # The turn's time covers all attempts at the request; the episode's time bounds them.
            bounds = replace(limits, context_tokens=UNBOUNDED, turn_seconds=config.episode.seconds)
            yield remote, dialogue, bounds
        return
    progress.say("starting the generator")
    path = await asyncio.to_thread(prepare_model, config.model, config.models_dir)
    logs = config.directory.resolve() / "logs"
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    engine = engine_settings(config, path, logs / "vllm.log", resolve(config.precision))
    async with open_vllm(engine) as local:
        yield local, Dialogue(ChatTokenizer(path)), limits


def _say_losses(result: dict[str, Any], progress: Progress) -> None:
    for why, count in result["unscored"].items():
        progress.say(f"{count} of {result['attempts']} attempts have no verdict: {why}")
    if not result["scored"]:
        raise StarvedError(f"none of {result['attempts']} attempts was scored")


def table(attempts: Attempts, asked: Question, *, seed: int) -> Table:
    """pass@k in percent with 95 % intervals, one row for each level and k."""
    made = Table("tasks", "k", "pass@k", "95 % interval", "problems", "interval by")
    for name, row in attempts.pass_at(asked.ks, seed=seed).items():
        for each in row:
            interval = f"{each.low:.1%} to {each.high:.1%}"
            made.add_row(name, str(each.k), f"{each.value:.1%}", interval, str(each.tasks), each.method)
    return made
