"""The loop: tasks in, trained weights out, all stages in one TaskGroup.

    curriculum ─▶ feed ─▶ slots ─▶ play (N) ─▶ buffer ─▶ train ─▶ publish
        ▲           ▲                │                              │
        └─ observe ─┼────────────────┘                              │
                    └── slots freed: weights live, or group dropped ┘

Shutdown, in order: `train` ends (all steps done, time over, tasks exhausted, or an error); the feed is
cancelled and with it every group under way, whose rollouts release their sandboxes; what had been
played and not trained is entered as left over.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from rl.advantage import DEFAULT_RULE, AdvantageRule, scored_advantages
from rl.batching import pack_group
from rl.buffer import GroupBuffer, Ready, Taken
from rl.checkpoint import LoopState
from rl.curriculum import Curriculum
from rl.errors import Exhausted, NonFiniteStep, StarvedError
from rl.group_play import GroupPlay, GroupRules
from rl.length_bias import LengthBias
from rl.metrics import Interval, Row, fate_of, training_row, wait_ratio
from rl.player import Played, Player
from rl.trainer_process import Trainer
from rl.types import Batch, Group, StepReport, Task, Unscored
from rl.weights import Publisher

BARREN_BATCHES = 20
"""So many batches' worth of groups in a row without any signal: the tasks are all too hard or too easy."""

LOST_BATCHES = 3
"""So many batches' worth of groups in a row lost to infrastructure: it will not come back by itself."""

STALE_BATCHES = 20
"""So many batches' worth of groups given up as too old without one trained step: the bound is too narrow."""

NON_FINITE_STEPS = 3
"""So many steps in a row that were not finite: the weights are beyond repair."""

RECENT_STEPS = 4
"""The first steps of a run are the longest; by the longest of what followed it is judged how long it takes
to train one more batch."""

LOST_PAUSE_SECONDS = 0.1
LOST_PAUSE_LIMIT_SECONDS = 5.0
"""After a group lost to infrastructure the next one waits, twice as long each time, up to the limit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train and on how much at a time; `deadline` on the loop's clock, None for no limit.

    `replace_silent`: groups without a signal are replaced by others; otherwise they take their place
    in the batch and train nothing, as in a plain loop. `advantages`: how their rewards are compared.
    `spare_samples` and `min_samples` are as in `GroupRules`.
    """

    steps: int
    groups_per_batch: int
    samples_per_group: int
    replace_silent: bool = True
    deadline: float | None = None
    advantages: AdvantageRule = DEFAULT_RULE
    spare_samples: int = 0
    min_samples: int = 2

    @property
    def group_rules(self) -> GroupRules:
        """How one group is played."""
        return GroupRules(self.samples_per_group, self.spare_samples, self.min_samples)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop is made of. `on_step` receives each step's row when its weights are live."""

    curriculum: Curriculum
    player: Player
    buffer: GroupBuffer
    trainer: Trainer
    publisher: Publisher
    on_step: Callable[[Row], Coroutine[None, None, None]]
    clock: Callable[[], float] = time.monotonic


class Loop:
    """One run of the stages. `step` counts batches taken, also those that trained nothing."""

    def __init__(self, parts: Parts, plan: Plan, resumed: LoopState | None = None) -> None:
        self.step = resumed.step if resumed else 0
        self.version = parts.publisher.version
        """Updates of the weights so far; the generator serves this version once it is published."""
        self._observed = set(resumed.observed if resumed else ())
        """Keys of unsettled tasks that the curriculum has heard about."""
        self.ended_because = ""
        """Why the tasks ran out; empty while they have not."""
        self.waiting_seconds = 0.0
        self.training_seconds = 0.0
        self._parts = parts
        self._plan = plan
        self._pending = deque(resumed.pending if resumed else ())
        self._members: dict[int, list[Played]] = {}
        self._interval = Interval()
        self._barren = 0
        self._lost = 0
        self._stale = 0
        self._non_finite = 0
        self.lengths = LengthBias()
        """What has been trained on, against what has been given up for being late."""
        self._last_loss = ""
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_STEPS)

    def state(self, saved_version: int) -> LoopState:
        """What goes into a checkpoint beside trainer state of version `saved_version`.

        That may be one ahead of `version`: the trainer has finished a step whose report is on its way.
        """
        ahead = saved_version > self.version
        pending = [*self._parts.buffer.unsettled(training=not ahead), *self._pending]
        return LoopState(
            step=self.step + ahead,
            version=saved_version,
            curriculum=self._parts.curriculum.state_dict(),
            pending=tuple(pending),
            observed=tuple(task.key for task in pending if task.key in self._observed),
        )

    async def run(self) -> None:
        """Trains until the plan is fulfilled. Raises what ended it early, the first error of any stage."""
        try:
            async with asyncio.TaskGroup() as stages:
                training = stages.create_task(self._train(), name="train")
                feeding = stages.create_task(self.outlive(self._feed(), training), name="feed")
                training.add_done_callback(lambda _: feeding.cancel())
        except BaseExceptionGroup as group:
            error = first_error(group)
            # Fewer tasks than steps is an ending, not a failure: `step` tells how far it got.
            if not isinstance(error, Exhausted):
                raise error from None
        finally:
            self._members.clear()
            self._parts.player.ledger.settle_open()

    async def outlive(self, stage: Coroutine[None, None, None], consumer: asyncio.Task[None]) -> None:
        """A producer that returns while its consumer still waits would leave it waiting for ever."""
        await stage
        if not consumer.done():
            raise StarvedError(f"the feed ended at step {self.step} of {self._plan.steps}")

    async def _feed(self) -> None:
        """Consumes: tasks of the curriculum. Waits for: a slot. Unblocked by: weights that went live, a
        dropped group. Produces: groups being played.
        """
        buffer = self._parts.buffer
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._pause_after_losses()
                await buffer.admitted()
                try:
                    task, again = self._next_task()
                except Exhausted as error:
                    self.ended_because = str(error)
                    buffer.close()
                    break
                play = GroupPlay(self._parts.player, task, self._plan.group_rules)
                ticket = buffer.claim(task, self._parts.publisher.version, play.end)
                groups.create_task(self._play(ticket, play, again=again))
        # All groups have ended: hold the stage open, for `train` now decides when the run is over.
        await asyncio.Event().wait()

    def _next_task(self) -> tuple[Task, bool]:
        """The next task, and whether a stopped run has played it before."""
        if self._pending:
            return self._pending.popleft(), True
        return self._parts.curriculum.next_task(), False

    async def _play(self, ticket: int, play: GroupPlay, *, again: bool) -> None:
        """Consumes: a task and its slot. Waits for: its episodes. Unblocked by: the generator, the
        sandboxes, the episode time limit, the policy. Produces: a group in the buffer, or a dropped one.
        """
        task, buffer = play.task, self._parts.buffer
        members = await play.run(
            lambda: buffer.note_begun(ticket, self._parts.publisher.version),
            lambda count: buffer.note_scored(ticket, count),
        )
        group = play.group(members)
        self._members[ticket] = members
        if not (again and task.key in self._observed):
            rewards = [episode.reward for episode in group.scored if episode.reward is not None]
            self._parts.curriculum.observe(task, rewards)
            self._observed.add(task.key)
        reason = self._judge(play, group)
        self._interval.group_played(members, reason or "ready")
        if reason is None:
            buffer.finish(ticket, group)
        else:
            self._drop(ticket, task, reason)

    def _judge(self, play: GroupPlay, group: Group) -> str | None:
        """Why the group is not worth a place in a batch; None when it is. Raises StarvedError."""
        if play.too_few(group) and play.ended:
            self._count_stale()
            return "stale"
        if play.too_few(group):
            self._lost += 1
            first = next(episode.outcome for episode in group.episodes if episode.reward is None)
            self._last_loss = f"{first.kind}: {first.detail}" if isinstance(first, Unscored) else str(first)
            if self._lost >= LOST_BATCHES * self._plan.groups_per_batch:
                raise StarvedError(f"{self._lost} groups in a row were lost, the last to {self._last_loss}")
            return "partial" if group.scored else "lost"
        self._lost = 0
        if scored_advantages(group, self._plan.advantages) is not None:
            self._barren = 0
            return None
        self._barren += 1
        if self._barren >= BARREN_BATCHES * self._plan.groups_per_batch:
            raise StarvedError(
                f"{self._barren} groups in a row had equal rewards throughout, the last ones "
                f"{group.solve_rate:.0%} solved: choose easier or harder tasks, or larger groups"
            )
        return "zero_advantage" if self._plan.replace_silent else None

    def _count_stale(self) -> None:
        """Raises StarvedError."""
        self._stale += 1
        if self._stale >= STALE_BATCHES * self._plan.groups_per_batch:
            raise StarvedError(
                f"{self._stale} groups in a row were too old to be trained on: raise staleness_bound, or "
                "choose the windowed policy, which waits for them"
            )

    async def _pause_after_losses(self) -> None:
        if self._lost:
            await asyncio.sleep(min(LOST_PAUSE_SECONDS * 2**self._lost, LOST_PAUSE_LIMIT_SECONDS))

    async def _train(self) -> None:
        """Consumes: groups in the buffer. Waits for: a batch. Unblocked by: finished groups. Produces:
        weights that are live in the generator, and free slots.
        """
        parts = self._parts
        while self.step < self._plan.steps:
            began = parts.clock()
            depth = parts.buffer.depth
            version = parts.publisher.version
            taken = await self._take_in_time(version)
            if taken is None:
                return
            for stale in taken.stale:
                self._settle(stale.ticket, stale.group.task, "stale")
                self._interval.count("off_policy/dropped")
                self._count_stale()
            ready = parts.clock()
            row = {"buffer/depth": float(depth), "buffer/ready": float(parts.buffer.depth + len(taken.batch))}
            row["buffer/bytes"] = float(parts.buffer.bytes + sum(each.group.bytes for each in taken.batch))
            row |= _staleness_row(taken.batch, version)
            report = await self._step(taken.batch)
            trained = parts.clock()
            self.step += 1
            if report is not None:
                self.version = version + 1
                await parts.publisher.publish(self.version)
                parts.buffer.release()
                row |= training_row(report)
            row |= self._timing(began, ready, trained, parts.clock())
            await parts.on_step(row)

    async def _step(self, batch: Sequence[Ready]) -> StepReport | None:
        """One optimiser step; None when nothing in the batch could be trained, and its groups are dropped."""
        rule = self._plan.advantages
        packed = [group for group in (pack_group(ready.group, rule) for ready in batch) if group is not None]
        if not packed:
            for ready in batch:
                self._drop(ready.ticket, ready.group.task, "zero_advantage")
            return None
        try:
            report = await self._parts.trainer.step(Batch(self.step + 1, tuple(packed)))
        except NonFiniteStep:
            self._non_finite += 1
            if self._non_finite >= NON_FINITE_STEPS:
                raise
            for ready in batch:
                self._drop(ready.ticket, ready.group.task, "non_finite")
            return None
        self._non_finite = self._stale = 0
        self._parts.buffer.mark_trained(ready.ticket for ready in batch)
        trained_keys = {group.task_key for group in packed}
        for ready in batch:
            reason = None if ready.group.task.key in trained_keys else "zero_advantage"
            self._settle(ready.ticket, ready.group.task, reason)
        masked = int(report.extra.get("masked_tokens", 0))
        if masked:
            self._parts.player.ledger.withdraw_tokens(masked, "no_logprob")
        return report

    def _drop(self, ticket: int, task: Task, reason: str) -> None:
        self._parts.buffer.drop(ticket, reason)
        self._settle(ticket, task, reason)

    def _settle(self, ticket: int, task: Task, reason: str | None) -> None:
        """Enters every member of a group in the ledger: trained (None), or dropped for `reason`."""
        self._observed.discard(task.key)
        for member in self._members.pop(ticket):
            fate, why = fate_of(member, reason)
            self.lengths.note(member.account.tokens, fate, why)
            self._parts.player.ledger.settle(member.account, fate, why)

    async def _take_in_time(self, version: int) -> Taken | None:
        """The next batch; None when none comes that can still be trained and live before the deadline."""
        patience: float | None = None
        if self._plan.deadline is not None:
            patience = self._plan.deadline - max(self._recent_seconds, default=0.0) - self._parts.clock()
            if patience <= 0.0:
                return None
        try:
            async with asyncio.timeout(patience):
                return await self._parts.buffer.take(version)
        except TimeoutError:
            return None

    def _timing(self, began: float, ready: float, trained: float, live: float) -> Row:
        """`began` waiting, batch `ready`, `trained`, weights `live`: all on the loop's clock."""
        waiting, training = (ready - began) + (live - trained), trained - ready
        self.waiting_seconds += waiting
        self.training_seconds += training
        self._recent_seconds.append(live - ready)
        row = self._interval.row(live - began)
        self._interval = Interval()
        return (
            row
            | self._parts.curriculum.metrics()
            | self.lengths.row()
            | {
                "step": float(self.step),
                "version": float(self._parts.publisher.version),
                "time/step": live - began,
                "time/wait_for_batch": ready - began,
                "time/train": training,
                "time/publish": live - trained,
                "perf/wait_time_ratio": wait_ratio(waiting, training),
                "rollout/inflight": float(self._parts.player.running),
            }
        )


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups: what set off the others, which were cancelled."""
    inner = group.exceptions[0]
    return first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _staleness_row(batch: Sequence[Ready], version: int) -> Row:
    """Raises ValueError on a negative staleness: a generator that claims weights it cannot have."""
    ages = [version - ready.oldest_version for ready in batch]
    if min(ages) < 0:
        raise ValueError(f"a group holds tokens of version {version - min(ages)}, newer than {version}")
    return {"off_policy/mean": sum(ages) / len(ages), "off_policy/max": float(max(ages))}
