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
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from rl.batching import pack_group
from rl.buffer import Ready, Taken
from rl.checkpoint import LoopState
from rl.curriculum import digest
from rl.errors import Exhausted, NonFiniteStep, StarvedError
from rl.group_play import GroupPlay
from rl.metrics import Interval, Row, training_row
from rl.plan import Parts, Plan
from rl.settling import Settling
from rl.sieve import Sieve
from rl.step_timing import StepTiming
from rl.types import Batch, StepReport, Task


class Loop:
    """One run of the stages. `step` counts batches taken, also those that trained nothing."""

    def __init__(self, parts: Parts, plan: Plan, resumed: LoopState | None = None) -> None:
        self.step = resumed.step if resumed else 0
        self.version = parts.publisher.version
        """Updates of the weights so far; the generator serves this version once it is published."""
        self.ended_because = ""
        """Why the tasks ran out; empty while they have not."""
        self.timing = StepTiming(resumed)
        self.settling = Settling(parts.player.ledger, resumed)
        self.trained_keys: tuple[str, ...] = ()
        """Tasks that the newest step trained on, in order."""
        self._parts = parts
        self._plan = plan
        self._pending = deque(resumed.pending if resumed else ())
        self._interval = Interval()
        self._sieve = Sieve(plan)

    def state(self, saved_version: int) -> LoopState:
        """What goes into a checkpoint beside trainer state of version `saved_version`.

        That may be one ahead of `version`: the trainer has finished a step whose report is on its way.
        """
        ahead = saved_version > self.version
        pending = [*self._parts.buffer.unsettled(training=not ahead), *self._pending]
        settling = self.settling
        return LoopState(
            step=self.step + ahead,
            version=saved_version,
            curriculum=self._parts.curriculum.state_dict(),
            pending=tuple(pending),
            observed=tuple(task.key for task in pending if task.key in settling.observed),
            dropped=dict(settling.dropped),
            waiting_seconds=self.timing.waiting_seconds,
            training_seconds=self.timing.training_seconds,
            ledger=settling.state_dict(ahead=ahead),
        )

    def account_of_step(self, step: int | None = None) -> dict[str, Any]:
        """What became of tasks since the step before, told once: those that this step trained on, in order,
        and those dropped, with the reason. `curriculum` is a digest of its state: runs of a seed that are in
        step with one another have the same.
        """
        return {
            "step": self.step if step is None else step,
            "trained": list(self.trained_keys),
            "dropped": self.settling.take_dropped(),
            "curriculum": digest(self._parts.curriculum),
        }

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
            self.settling.close()

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
                if pause := self._sieve.pause_seconds:
                    await asyncio.sleep(pause)
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
        self.settling.played(ticket, members)
        if not (again and task.key in self.settling.observed):
            rewards = [episode.reward for episode in group.scored if episode.reward is not None]
            self._parts.curriculum.observe(task, rewards)
            self.settling.observed.add(task.key)
        reason = self._sieve.judge(play, group)
        self._interval.group_played(members, reason or "ready")
        if reason is None:
            buffer.finish(ticket, group)
        else:
            self._drop(ticket, task, reason)

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
                self.settling.settle(stale.ticket, stale.group.task, "stale")
                self._interval.count("off_policy/dropped")
                self._sieve.count_stale()
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
            row |= self._rest_of_row(self.timing.step(began, ready, trained, parts.clock()))
            await parts.on_step(row)

    async def _step(self, batch: Sequence[Ready]) -> StepReport | None:
        """One optimiser step; None when nothing in the batch could be trained, and its groups are dropped."""
        rule = self._plan.advantages
        packed = [group for group in (pack_group(ready.group, rule) for ready in batch) if group is not None]
        if not packed:
            self.trained_keys = ()
            for ready in batch:
                self._drop(ready.ticket, ready.group.task, "zero_advantage")
            return None
        self.trained_keys = tuple(group.task_key for group in packed)
        self.settling.begin_step(batch, self._why_untrained)
        try:
            report = await self._parts.trainer.step(Batch(self.step + 1, tuple(packed)))
        except NonFiniteStep:
            self.trained_keys = ()
            if self._sieve.is_hopeless():
                raise
            for ready in batch:
                self._drop(ready.ticket, ready.group.task, "non_finite")
            return None
        self._sieve.trained()
        self._parts.buffer.mark_trained(ready.ticket for ready in batch)
        for ready in batch:
            self.settling.settle(ready.ticket, ready.group.task, self._why_untrained(ready))
        masked = int(report.extra.get("masked_tokens", 0))
        if masked:
            self._parts.player.ledger.withdraw_tokens(masked, "no_logprob")
        return report

    def _why_untrained(self, ready: Ready) -> str | None:
        return None if ready.group.task.key in self.trained_keys else "zero_advantage"

    def _drop(self, ticket: int, task: Task, reason: str) -> None:
        self._parts.buffer.drop(ticket, reason)
        self.settling.settle(ticket, task, reason)

    async def _take_in_time(self, version: int) -> Taken | None:
        """The next batch; None when none comes that can still be trained and live before the deadline."""
        patience = self.timing.patience(self._plan.deadline, self._parts.clock())
        if patience is not None and patience <= 0.0:
            return None
        try:
            async with asyncio.timeout(patience):
                return await self._parts.buffer.take(version)
        except TimeoutError:
            return None

    def _rest_of_row(self, times: Row) -> Row:
        """What happened since the step before, and where everything stands."""
        row = self._interval.row(times["time/step"])
        self._interval = Interval()
        return (
            row
            | self._parts.curriculum.metrics()
            | self.settling.lengths.row()
            | times
            | {
                "step": float(self.step),
                "version": float(self._parts.publisher.version),
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
