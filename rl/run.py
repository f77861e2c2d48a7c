"""Puts a run together from its settings (daemon, generator, trainer, loop); measures, trains, measures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl import tracing
from rl.buffer import GroupBuffer
from rl.checkpoint import LoopState, newest_checkpoint, read_state, write_checkpoint
from rl.config import Config, EpisodeConfig, traces_protocol
from rl.curriculum import Curriculum, SolveRateBands, Uniform
from rl.dialogue import Dialogue
from rl.errors import ConfigError, TrainerDead
from rl.evaluation import evaluate
from rl.generator import Generator
from rl.generators.vllm import VllmSettings, open_vllm
from rl.ledger import Ledger, MeteredGenerator
from rl.loop import Loop, Parts, Plan
from rl.metrics import MetricsLog, Row
from rl.model import ChatTokenizer, prepare_model
from rl.observer import Observer, Watched
from rl.player import Player
from rl.policies import build_policy
from rl.precision import Precision, resolve
from rl.progress import Progress
from rl.report import write_report
from rl.rollout import Limits, Rollout
from rl.sandboxes import DaemonSandboxes, own_daemon
from rl.summary import Results, check_sandboxes, summarise
from rl.tasks import HeldOut, TaskSource, build_held_out, builtin_families, load_family, shipped_families
from rl.trainer_process import Trainer, start_trainer
from rl.weights import Publisher, weights_directory
from sandboxd import Client

SAVE_SECONDS = 6.5
"""The longest that saving may take after Ctrl-C, which must end within 10 s in all."""

AFTER_SHARE = 0.8
"""The measurement after training takes 0.55 to 0.7 of the first one's time: trained turns are short."""

REPORT_SECONDS = 3.0
"""Kept free at the end of a run with a time limit, for the report and for stopping the processes."""


@dataclass(frozen=True, slots=True)
class Engines:
    """What a run holds that is costly to start, ready to use."""

    generator: Generator
    trainer: Trainer
    model_path: Path
    weights: Path


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: at nothing, or at a checkpoint."""

    checkpoint: Path | None = None
    state: LoopState | None = None


async def run(config: Config, start: Start, progress: Progress, began: float) -> dict[str, Any]:
    """Trains and measures; returns the summary, which lies in the run's directory beside the report.

    `began` is when the program started, on time.monotonic: a time limit counts from there. Raises
    ConfigError before anything costly, LedgerError after the report is written.
    """
    source = task_source(config)
    held_out = build_held_out(source, per_kind=config.heldout.per_kind, per_level=config.heldout.per_level)
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.exported(traces_protocol(), config.name))
        address = config.sandboxes.address
        if not address:
            progress.say("starting the sandbox daemon")
            address = await stack.enter_async_context(own_daemon(config.sandboxes, config.directory))
        control = await stack.enter_async_context(Client(address))
        before = await control.get_pool(config.sandboxes.pool)
        engines = await stack.enter_async_context(open_engines(config, start, progress))
        session = Session(config, start, progress, began)
        ledger = Ledger()
        async with Client(address) as client:
            results = await session.play(engines, Leasing(control, client), ledger, (source, held_out))
        after = await control.get_pool(config.sandboxes.pool)
        progress.say("stopping the processes")
    summary = summarise(config, results, ledger, (before, after))
    directory = config.directory
    await asyncio.to_thread(_write_results, directory, summary)
    ledger.check()
    if not config.sandboxes.address:
        check_sandboxes(before, after)
    return summary


def _write_results(directory: Path, summary: dict[str, Any]) -> None:
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(directory)


def task_source(config: Config) -> TaskSource:
    """The families that the settings name. Raises UnknownFamily."""
    shipped = shipped_families()
    names = config.families or [family.name for family in builtin_families()]
    return TaskSource(shipped[name] if name in shipped else load_family(name) for name in names)


def find_start(config: Config, *, resume: bool) -> Start:
    """Prepares the run's directory. A run of the same name that is not resumed is moved aside."""
    directory = config.directory
    checkpoint = newest_checkpoint(directory / "checkpoints")
    if resume and checkpoint is None:
        raise ConfigError(f"there is no checkpoint under {directory / 'checkpoints'}; leave out --resume")
    if resume and checkpoint is not None:
        return Start(checkpoint, read_state(checkpoint))
    if directory.exists():
        number = 1
        while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
            number += 1
        directory.rename(aside)
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(config.as_toml())
    return Start()


def engine_settings(config: Config, model_path: Path, log: Path, precision: Precision) -> VllmSettings:
    """How the run's engine is started."""
    return VllmSettings(
        model=model_path.resolve(),
        log_path=log,
        seed=config.seed,
        max_concurrent=config.concurrent_episodes,
        max_context=config.episode.context_tokens,
        kv_cache_bytes=config.generator.kv_cache_bytes,
        compiled=config.generator.compiled,
        precision=precision,
    )


@asynccontextmanager
async def open_engines(config: Config, start: Start, progress: Progress) -> AsyncIterator[Engines]:
    """Starts the generator and the trainer side by side, for the length of the block."""
    progress.say("preparing the model")
    model_path = await asyncio.to_thread(prepare_model, config.model, config.models_dir)
    logs = config.directory.resolve() / "logs"
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    precision = resolve(config.precision)
    settings = engine_settings(config, model_path, logs / "vllm.log", precision)
    async with AsyncExitStack() as stack:
        weights = await stack.enter_async_context(weights_directory())
        trainer = await stack.enter_async_context(start_trainer(logs / "trainer.log"))
        progress.say(f"starting the generator and the trainer, in {precision}")
        async with asyncio.TaskGroup() as starting:
            starting.create_task(trainer.load(model_path.resolve(), config.trainer, precision))
            generator = await stack.enter_async_context(open_vllm(settings))
        if start.checkpoint is not None:
            await trainer.restore(start.checkpoint.resolve())
        yield Engines(generator, trainer, model_path.resolve(), weights)


@dataclass(frozen=True, slots=True)
class Leasing:
    """Two clients of one daemon: `control` reads counts also after `client` has released all it leased."""

    control: Client
    client: Client


def episode_limits(config: EpisodeConfig) -> Limits:
    """What the settings allow one episode."""
    return Limits(
        max_turns=config.max_turns,
        turn_tokens=config.turn_tokens,
        context_tokens=config.context_tokens,
        code_seconds=config.code_seconds,
        turn_seconds=config.turn_seconds,
        verify_seconds=config.verify_seconds,
    )


class Session:
    """One run between the start of its engines and their end."""

    def __init__(self, config: Config, start: Start, progress: Progress, began: float) -> None:
        self._config = config
        self._start = start
        self._progress = progress
        self._began = began
        self._saved_step = -1
        self._saving: asyncio.Future[None] | None = None
        self._before: dict[str, Any] = {}

    async def play(
        self, engines: Engines, leasing: Leasing, ledger: Ledger, tasks: tuple[TaskSource, HeldOut]
    ) -> Results:
        """Measures, trains, measures. Saves a checkpoint when training ends, also when it is broken off."""
        config, state = self._config, self._start.state
        source, held_out = tasks
        sandboxes = self._sandboxes(leasing.client)
        player = self._player(MeteredGenerator(engines.generator, ledger), sandboxes, engines, source)
        publisher = Publisher(engines.trainer, engines.generator, engines.model_path, engines.weights)
        if state is not None and state.version > 0:
            await publisher.publish(state.version)
        self._before = state.before if state is not None else {}
        if not self._before:
            self._before = await self._measure(player, held_out, "before")
        log = MetricsLog(config.directory / "metrics.jsonl", resume_after=state.step if state else None)
        watched = Watched(leasing.control, config.sandboxes.pool, sandboxes, engines.generator)
        observer = Observer(watched, log, self._progress)

        async def on_step(row: Row) -> None:
            every = config.heldout.every_steps
            if every and loop.step % every == 0:
                row |= _heldout_row(await self._measure(player, held_out, f"at step {loop.step}"))
            await observer.step(row)
            if config.checkpoint_every_steps and loop.step % config.checkpoint_every_steps == 0:
                await self._save(engines.trainer, loop)

        parts = Parts(
            curriculum=self._curriculum(source),
            player=player,
            buffer=GroupBuffer(
                build_policy(config.queue.rules, config.staleness_bound, config.groups_per_batch)
            ),
            trainer=engines.trainer,
            publisher=publisher,
            on_step=on_step,
        )
        plan = self._plan()
        loop = Loop(parts, plan, state)
        self._progress.until(plan.deadline)
        self._progress.say("training")
        began = time.monotonic()
        await self._train(loop, engines.trainer)
        if loop.ended_because:
            self._progress.say(f"training ends after step {loop.step}: {loop.ended_because}")
        loop_seconds, idle = time.monotonic() - began, observer.idle_ratio()
        after = await self._measure(player, held_out, "after")
        return Results(
            before=self._before,
            after=after,
            rows=log.rows,
            steps=loop.step,
            versions=publisher.version,
            waiting_seconds=loop.waiting_seconds,
            training_seconds=loop.training_seconds,
            loop_seconds=loop_seconds,
            wall_seconds=self._wall_seconds(),
            generator_idle_ratio=idle,
        )

    async def _train(self, loop: Loop, trainer: Trainer) -> None:
        """Runs the loop and saves what it reached, however it ends; in haste when it is interrupted."""
        try:
            await loop.run()
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(SAVE_SECONDS):
                    if self._saving is not None:
                        await self._saving
                    await self._save(trainer, loop)
            except TimeoutError:
                self._progress.say(f"not saved within {SAVE_SECONDS:g} s: the checkpoint before is the last")
            raise
        except TrainerDead:
            raise
        except Exception:
            await self._save(trainer, loop)
            raise
        await self._save(trainer, loop)

    def _wall_seconds(self) -> float:
        """Since the program started, and what a resumed run had spent before."""
        before = self._start.state.wall_seconds if self._start.state else 0.0
        return time.monotonic() - self._began + before

    def _plan(self) -> Plan:
        config = self._config
        limit = config.time_limit_seconds
        reserve = AFTER_SHARE * float(self._before["seconds"]) + REPORT_SECONDS
        return Plan(
            steps=config.steps,
            groups_per_batch=config.groups_per_batch,
            samples_per_group=config.samples_per_group,
            replace_silent=config.filter,
            deadline=None if limit is None else self._began + limit - reserve,
            advantages=config.advantage_rule,
            spare_samples=config.queue.spare_samples,
            min_samples=config.queue.min_samples,
        )

    def _curriculum(self, source: TaskSource) -> Curriculum:
        config = self._config
        curriculum: Curriculum
        if config.filter:
            curriculum = SolveRateBands(source, list(source.families), seed=config.seed)
        else:
            places = [(family, level) for family, count in source.levels().items() for level in range(count)]
            curriculum = Uniform(source, places, seed=config.seed)
        if self._start.state is not None:
            curriculum.load_state_dict(self._start.state.curriculum)
        return curriculum

    def _sandboxes(self, client: Client) -> DaemonSandboxes:
        wanted = self._config.sandboxes
        return DaemonSandboxes(client, wanted.pool, ttl=wanted.ttl_seconds, timeout=wanted.timeout_seconds)

    def _player(
        self, generator: MeteredGenerator, sandboxes: DaemonSandboxes, engines: Engines, source: TaskSource
    ) -> Player:
        config = self._config.episode
        limits = episode_limits(config)
        dialogue = Dialogue(ChatTokenizer(engines.model_path))
        rollout = Rollout(generator, sandboxes, dialogue, source, limits=limits)
        return Player(
            rollout,
            generator.ledger,
            concurrent=self._config.concurrent_episodes,
            episode_seconds=config.seconds,
        )

    async def _measure(self, player: Player, held_out: HeldOut, when: str) -> dict[str, Any]:
        self._progress.say(f"measuring on held-out problems, {when}")
        result = await evaluate(player, held_out.benchmark, held_out.mix)
        self._progress.say(f"held-out {when}: {result.describe()}")
        return result.as_dict()

    async def _save(self, trainer: Trainer, loop: Loop) -> None:
        """Saves unless this step is saved already or nothing has been trained."""
        if loop.step == self._saved_step or loop.step == 0:
            return
        # Shielded: an interruption while it writes lets it finish rather than begin again.
        self._saving = asyncio.ensure_future(self._write_checkpoint(trainer, loop))
        await asyncio.shield(self._saving)

    async def _write_checkpoint(self, trainer: Trainer, loop: Loop) -> None:
        step = loop.step

        def state_at(version: int) -> LoopState:
            return replace(loop.state(version), before=self._before, wall_seconds=self._wall_seconds())

        await write_checkpoint(self._config.directory.resolve() / "checkpoints", trainer, state_at)
        self._saved_step = step


def _heldout_row(measured: dict[str, Any]) -> Row:
    row = {"heldout/overall": measured["overall"], "heldout/benchmark": measured["benchmark"]["overall"]}
    row |= {f"heldout/{kind}": rate for kind, rate in measured["benchmark"]["kinds"].items()}
    return {name: float(value) for name, value in row.items() if value is not None}
