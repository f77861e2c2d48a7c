"""One run between the start of its engines and their end: measures, trains, measures."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from rl.buffer import GroupBuffer
from rl.checkpoint import LoopState
from rl.config import Config, EpisodeConfig
from rl.curriculum import BandSettings, Curriculum, SolveRateBands, Uniform
from rl.dialogue import Dialogue
from rl.engines import Engines
from rl.errors import CheckpointFailed, ConfigError
from rl.evaluation import evaluate
from rl.generator import Generator
from rl.kept_weights import WeightsKeeper
from rl.ledger import Ledger, MeteredGenerator
from rl.loop import Loop
from rl.metrics import Row
from rl.observer import Observer, Watched
from rl.pace import CountedRollout, Paced, Pacemaker
from rl.plan import Parts, Plan
from rl.player import Player
from rl.policies import build_policy
from rl.progress import Progress
from rl.rollout import Limits, Rollout
from rl.sandboxes import DaemonSandboxes
from rl.saving import Saved, Saver
from rl.start import Start
from rl.step_log import StepLogs
from rl.summary import Results
from rl.tasks import (
    HeldOut,
    TaskSource,
)
from rl.telemetry import Telemetry
from rl.weights import Publisher
from sandboxd import Client

AFTER_SHARE = 0.8
"""The measurement after training takes 0.55 to 0.7 of the first one's time: trained turns are short."""

REPORT_SECONDS = 3.0
"""Kept free at the end of a run with a time limit, for the report and for stopping the processes."""


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
        sandboxes = DaemonSandboxes.of(leasing.client, config.sandboxes)
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
            bands = BandSettings(**config.curriculum.model_dump())
            curriculum = SolveRateBands(source, list(source.families), seed=config.seed, settings=bands)
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
