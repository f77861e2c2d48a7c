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
from rl.checkpoint import LoopState, newest_checkpoint, read_state, remove_leftovers
from rl.config import Config, EpisodeConfig, metrics_protocol, traces_protocol
from rl.curriculum import Curriculum, SolveRateBands, Uniform
from rl.dialogue import Dialogue, Tokenizer
from rl.errors import CheckpointFailed, ConfigError
from rl.evaluation import evaluate
from rl.fakes import FakeTrainer
from rl.generator import Generator
from rl.generators.fake import ByteTokenizer
from rl.generators.opening import open_generator
from rl.kept_weights import WeightsKeeper
from rl.ledger import Ledger, MeteredGenerator
from rl.loop import Loop
from rl.metrics import Row
from rl.model import ChatTokenizer, prepare_model
from rl.observer import Observer, Watched
from rl.pace import CountedRollout, Paced, Pacemaker
from rl.plan import Parts, Plan
from rl.player import Player
from rl.policies import build_policy
from rl.precision import resolve
from rl.progress import Progress
from rl.rehearsal import empty_model, fake_generator
from rl.report import write_report
from rl.rollout import Limits, Rollout
from rl.sandboxes import DaemonSandboxes, leases_ended, own_daemon
from rl.saving import Saved, Saver
from rl.step_log import StepLogs
from rl.summary import Results, check_sandboxes, summarise
from rl.tasks import (
    HeldOut,
    TaskSource,
    UnknownFamily,
    build_held_out,
    builtin_families,
    load_family,
    shipped_families,
)
from rl.telemetry import Telemetry, exported
from rl.trainer_process import Trainer, start_trainer
from rl.weights import Publisher, open_segment_file, weights_directory
from sandboxd import Client

AFTER_SHARE = 0.8
"""The measurement after training takes 0.55 to 0.7 of the first one's time: trained turns are short."""

SETTINGS_FILE = "config.toml"

REPORT_SECONDS = 3.0
"""Kept free at the end of a run with a time limit, for the report and for stopping the processes."""

LEASES_SECONDS = 30.0
"""A run waits no longer at its end for leases that were not given back to run out."""


@dataclass(frozen=True, slots=True)
class Engines:
    """What a run holds that is costly to start, ready to use."""

    generator: Generator
    trainer: Trainer
    model_path: Path
    weights: Path
    tokenizer: Tokenizer
    segment: Path | None


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: at nothing, or at a checkpoint."""

    checkpoint: Path | None = None
    state: LoopState | None = None


async def run(config: Config, start: Start, progress: Progress, began: float) -> dict[str, Any]:
    """Trains and measures; returns the summary, which lies in the run's directory beside the report.

    `began` is when the program started, on time.monotonic: a time limit counts from there. Raises
    ConfigError before anything costly, and after the report is written LedgerError, or CheckpointFailed when
    what was trained last is not saved.
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
        telemetry = stack.enter_context(exported(metrics_protocol(), config.name))
        session.telemetry = telemetry
        ledger = Ledger(start.state.ledger if start.state else None)
        async with Client(address) as client:
            results = await session.play(engines, Leasing(control, client), ledger, (source, held_out))
        own = not config.sandboxes.address
        within = min(config.sandboxes.ttl_seconds + 1.0, LEASES_SECONDS) if own else 0.0
        after = await leases_ended(control, config.sandboxes.pool, within=within)
        progress.say("stopping the processes")
    summary = summarise(config, results, ledger, (before, after))
    directory = config.directory
    await asyncio.to_thread(_write_results, directory, summary)
    ledger.check()
    if not config.sandboxes.address:
        check_sandboxes(before, after)
    if session.unsaved is not None:
        raise session.unsaved
    return summary


def _write_results(directory: Path, summary: dict[str, Any]) -> None:
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(directory)


def task_source(config: Config) -> TaskSource:
    """The families that the settings name. Raises UnknownFamily."""
    shipped = shipped_families()
    names = config.families or [family.name for family in builtin_families()]
    for name in names:
        if name not in shipped and ":" not in name:
            raise UnknownFamily(
                f"no task family {name!r}: there are {', '.join(shipped)}, and your own by the name of"
                " package.module:Class"
            )
    return TaskSource(shipped[name] if name in shipped else load_family(name) for name in names)


def find_start(config: Config, *, resume: bool) -> Start:
    """Prepares the run's directory. A run of the same name that is not resumed is moved aside."""
    directory = config.directory
    checkpoint = newest_checkpoint(directory / "checkpoints")
    if resume and not (directory / SETTINGS_FILE).is_file():
        raise ConfigError(f"there is no run in {directory} to go on with; leave out --resume")
    if resume and checkpoint is not None:
        remove_leftovers(checkpoint.parent)
        return Start(checkpoint, read_state(checkpoint))
    # A run that ended before it saved anything has nothing to go on from: it begins anew.
    if directory.exists():
        number = 1
        while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
            number += 1
        directory.rename(aside)
    directory.mkdir(parents=True)
    (directory / SETTINGS_FILE).write_text(config.as_toml())
    return Start()


@asynccontextmanager
async def open_engines(config: Config, start: Start, progress: Progress) -> AsyncIterator[Engines]:
    """Starts the generator and the trainer side by side, for the length of the block."""
    rehearsed = config.trainer.backend == "fake"
    if rehearsed:
        model_path = await asyncio.to_thread(empty_model, config.directory / "model")
    else:
        progress.say("preparing the model")
        model_path = await asyncio.to_thread(prepare_model, config.model, config.models_dir)
    tokenizer = ByteTokenizer() if rehearsed else ChatTokenizer(model_path)
    logs = config.directory.resolve() / "logs"
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    precision = resolve(config.precision)
    async with AsyncExitStack() as stack:
        weights = await stack.enter_async_context(weights_directory())
        # An adapter goes as files: it is small, and not laid out as the engine's weights are.
        by_file = config.generator.weights == "file" or config.trainer.lora_rank > 0
        by_file |= config.generator.backend == "fake"
        segment = None if by_file else stack.enter_context(open_segment_file(weights))
        trainer: Trainer = FakeTrainer()
        generator: Generator = fake_generator(tokenizer, config.seed)
        async with asyncio.TaskGroup() as starting:
            if not rehearsed:
                trainer = process = await stack.enter_async_context(start_trainer(logs / "trainer.log"))
                progress.say(f"starting the generator and the trainer, in {precision}")
                starting.create_task(process.load(model_path.resolve(), config.trainer, precision))
            if config.generator.backend != "fake":
                opened = open_generator(config, model_path, logs, precision)
                generator = await stack.enter_async_context(opened)
        if start.checkpoint is not None:
            await trainer.restore(start.checkpoint.resolve())
        yield Engines(generator, trainer, model_path.resolve(), weights, tokenizer, segment)


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
        self.telemetry = Telemetry()
        self._saver: Saver | None = None
        self._before: dict[str, Any] = {}

    async def play(
        self, engines: Engines, leasing: Leasing, ledger: Ledger, tasks: tuple[TaskSource, HeldOut]
    ) -> Results:
        """Measures, trains, measures. Saves a checkpoint when training ends, also when it is broken off."""
        config, state = self._config, self._start.state
        source, held_out = tasks
        sandboxes = self._sandboxes(leasing.client)
        player = self._player(MeteredGenerator(engines.generator, ledger), sandboxes, engines, source)
        publisher = Publisher(
            engines.trainer, engines.generator, engines.model_path, engines.weights, engines.segment
        )
        await self._go_on(publisher, player, held_out)
        logs = await asyncio.to_thread(StepLogs.open, config.directory, state, self._progress.say)
        log, earlier = logs.metrics, logs.seconds
        saver = self._saver = self._make_saver(engines, logs)
        policy = build_policy(config.queue.rules, config.staleness_bound, config.groups_per_batch)
        buffer = GroupBuffer(policy)
        pace = self._pacemaker(player, engines.generator, buffer)
        pool, control = config.sandboxes.pool, leasing.control
        watched = Watched(control, pool, sandboxes, engines.generator, pace, self.telemetry)
        observer = Observer(watched, log, self._progress, earlier=earlier)

        async def on_step(row: Row) -> None:
            logs.tasks.write(loop.account_of_step())
            row |= await self._held_out_row(player, held_out, loop.step)
            await observer.step(row)
            await saver.after_step(loop, row)

        parts = Parts(
            curriculum=self.curriculum(source),
            player=player,
            buffer=buffer,
            trainer=engines.trainer,
            publisher=publisher,
            on_step=on_step,
        )
        plan = self._plan()
        loop = Loop(parts, plan, state)
        self._progress.until(plan.deadline)
        self._progress.say("training")
        began = time.monotonic()
        async with pace.running(control, pool), watched.lag.running():
            await saver.train(loop)
        if loop.ended_because:
            self._progress.say(f"training ends after step {loop.step}: {loop.ended_because}")
        loop_seconds, idle = earlier + time.monotonic() - began, observer.idle_ratio()
        after = await self._measure(player, held_out, "after")
        return Results(
            before=self._before,
            after=after,
            rows=log.rows,
            steps=loop.step,
            versions=publisher.version,
            timing=loop.timing,
            loop_seconds=loop_seconds,
            wall_seconds=self._wall_seconds(),
            generator_idle_ratio=idle,
            changes=pace.changes,
            lengths=loop.settling.lengths,
        )

    async def _held_out_row(self, player: Player, held_out: HeldOut, step: int) -> Row:
        """What is measured at this step; nothing when it is not its turn."""
        every = self._config.heldout.every_steps
        if not every or step % every:
            return {}
        return _heldout_row(await self._measure(player, held_out, f"at step {step}"))

    async def _go_on(self, publisher: Publisher, player: Player, held_out: HeldOut) -> None:
        """Makes a resumed run's weights live; measures before training, once in the life of a run."""
        state = self._start.state
        if state is not None and state.version > 0:
            await publisher.publish(state.version)
        self._before = state.before if state is not None else {}
        if not self._before:
            self._before = await self._measure(player, held_out, "before")

    def _pacemaker(self, player: Player, generator: Generator, buffer: GroupBuffer) -> Pacemaker:
        return Pacemaker(
            Paced(player, self._rollout, generator, buffer, self._config.groups_per_batch),
            self._progress.say,
            adapt=self._config.adapt_concurrency,
            tell=self.telemetry.record,
        )

    @property
    def unsaved(self) -> CheckpointFailed | None:
        """Why what was trained last is not saved; None when it is."""
        return self._saver.failure if self._saver else None

    def _make_saver(self, engines: Engines, logs: StepLogs) -> Saver:
        config, state = self._config, self._start.state

        def finish(found: LoopState) -> LoopState:
            return replace(found, before=self._before, wall_seconds=self._wall_seconds())

        run, trainer = config.directory.resolve(), engines.trainer
        every = config.heldout.weights_every_steps
        return Saver(
            Saved(run / "checkpoints", trainer, logs, finish, self._progress.say),
            every_steps=config.checkpoint_every_steps,
            newest=config.checkpoints_kept,
            last=state.step if state else -1,
            keeper=WeightsKeeper(run, trainer, engines.model_path, every) if every else None,
        )

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

    def curriculum(self, source: TaskSource) -> Curriculum:
        """New, or as the checkpoint has it. Raises ConfigError when that is of another kind."""
        config = self._config
        curriculum: Curriculum
        if config.filter:
            curriculum = SolveRateBands(source, list(source.families), seed=config.seed)
        else:
            places = [(family, level) for family, count in source.levels().items() for level in range(count)]
            curriculum = Uniform(source, places, seed=config.seed)
        if self._start.state is not None:
            try:
                curriculum.load_state_dict(self._start.state.curriculum)
            except KeyError as error:
                raise ConfigError(
                    f"filter = {config.filter}: the checkpoint is of a run with another curriculum, for it "
                    f"has no {error}; resume with the settings that the run began with"
                ) from error
        return curriculum

    def _sandboxes(self, client: Client) -> DaemonSandboxes:
        wanted = self._config.sandboxes
        return DaemonSandboxes(client, wanted.pool, ttl=wanted.ttl_seconds, timeout=wanted.timeout_seconds)

    def _player(
        self, generator: MeteredGenerator, sandboxes: DaemonSandboxes, engines: Engines, source: TaskSource
    ) -> Player:
        config = self._config.episode
        limits = episode_limits(config)
        dialogue = Dialogue(engines.tokenizer)
        self._rollout = CountedRollout(Rollout(generator, sandboxes, dialogue, source, limits=limits))
        return Player(
            self._rollout,
            generator.ledger,
            concurrent=self._config.concurrent_episodes,
            episode_seconds=config.seconds,
        )

    async def _measure(self, player: Player, held_out: HeldOut, when: str) -> dict[str, Any]:
        self._progress.say(f"measuring on held-out problems, {when}")
        result = await evaluate(player, held_out.benchmark, held_out.mix)
        self._progress.say(f"held-out {when}: {result.describe()}")
        return result.as_dict()


def _heldout_row(measured: dict[str, Any]) -> Row:
    row = {"heldout/overall": measured["overall"], "heldout/benchmark": measured["benchmark"]["overall"]}
    row |= {f"heldout/{kind}": rate for kind, rate in measured["benchmark"]["kinds"].items()}
    return {name: float(value) for name, value in row.items() if value is not None}
