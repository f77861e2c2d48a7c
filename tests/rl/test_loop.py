"""The loop on stand-ins: what it trains, what it refuses to train, and how it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rl.checkpoint import newest_checkpoint, read_state, write_checkpoint
from rl.errors import NonFiniteStep, StarvedError
from rl.generator import GeneratorDead, UpdateFailed
from rl.ledger import Fate
from rl.plan import Plan
from rl.types import Batch
from tests.rl.harness import AddingSandboxes, Counting, Rig


def closed(rig: Rig) -> None:
    """The books close, and every sandbox has been given back."""
    rig.ledger.check()
    assert rig.ledger.episodes.generated == rig.ledger.episodes.fates.total()
    assert rig.ledger.tokens.generated >= rig.generator.stats().generated_tokens > 0
    assert isinstance(rig.sandboxes, AddingSandboxes)
    assert rig.sandboxes.counts["acquired"] == rig.sandboxes.counts["left"]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_every_step_trains_and_is_published(tmp_path: Path, bound: int) -> None:
    rig = Rig(tmp_path, bound=bound, plan=Plan(steps=8, groups_per_batch=2, samples_per_group=4))
    asyncio.run(rig.loop.run())
    assert rig.loop.step == rig.loop.version == rig.generator.version == 8
    assert [row["step"] for row in rig.rows] == list(range(1, 9))
    assert max(row["off_policy/max"] for row in rig.rows) <= bound
    assert all(len(batch.groups) == 2 for batch in rig.trainer.batches)
    assert len(set(rig.trained)) == len(rig.trained) == 16
    closed(rig)


def test_a_bound_of_one_is_used(tmp_path: Path) -> None:
    rig = Rig(tmp_path, bound=1, plan=Plan(steps=8, groups_per_batch=2, samples_per_group=4))
    asyncio.run(rig.loop.run())
    assert max(row["off_policy/max"] for row in rig.rows) == 1


def test_groups_without_a_signal_are_replaced(tmp_path: Path) -> None:
    """A skill of 0.9 solves most groups of four throughout; none of those may reach the trainer."""
    rig = Rig(tmp_path, skill=lambda version: 0.9)
    asyncio.run(rig.loop.run())
    assert rig.buffer.dropped["zero_advantage"] > 0
    assert rig.ledger.episodes.reasons["zero_advantage"] == 4 * rig.buffer.dropped["zero_advantage"]
    for batch in rig.trainer.batches:
        for group in batch.groups:
            assert {sample.advantage > 0 for sample in group.samples} == {True, False}
    closed(rig)


def test_without_replacement_silent_groups_take_their_place_in_the_batch(tmp_path: Path) -> None:
    plan = Plan(steps=12, groups_per_batch=2, samples_per_group=2, replace_silent=False)
    rig = Rig(tmp_path, plan=plan, skill=lambda version: 0.8)
    asyncio.run(rig.loop.run())
    assert rig.loop.step == 12
    assert rig.loop.version == len(rig.trainer.batches) < 12
    assert 0 < len(rig.trained) < 24
    closed(rig)


def test_lost_sandboxes_are_never_zeros(tmp_path: Path) -> None:
    """Every third sandbox dies. Advantages equal those of the survivors alone, and the lost train nothing."""
    rig = Rig(tmp_path, sandboxes=AddingSandboxes(lambda number: number % 3 == 0), bound=0)
    asyncio.run(rig.loop.run())
    lost = rig.ledger.episodes.reasons["unscored:SANDBOX_LOST"]
    assert lost > 0
    heard = dict(rig.curriculum.heard)  # type: ignore[attr-defined]
    for batch in rig.trainer.batches:
        for group in batch.groups:
            rewards = np.array(heard[group.task_key])
            expected = (rewards - rewards.mean()) / rewards.std()
            assert [sample.advantage for sample in group.samples] == pytest.approx(expected)
    assert any(len(group.samples) < 4 for batch in rig.trainer.batches for group in batch.groups)
    closed(rig)


def test_infrastructure_that_stays_away_ends_the_run_and_is_named(tmp_path: Path) -> None:
    plan = Plan(steps=4, groups_per_batch=1, samples_per_group=2)
    rig = Rig(tmp_path, plan=plan, sandboxes=AddingSandboxes(lambda number: True))
    with pytest.raises(StarvedError, match=r"3 groups in a row were lost.*SANDBOX_LOST"):
        asyncio.run(rig.loop.run())
    assert not rig.trainer.batches
    closed(rig)


def test_a_generator_that_never_answers_ends_the_run(tmp_path: Path) -> None:
    """It is there and draws nothing: no progress is an end, too, and says which limit it was."""
    plan = Plan(steps=4, groups_per_batch=1, samples_per_group=2)
    never = asyncio.Event()
    rig = Rig(tmp_path, plan=plan, gate=lambda: never, episode_seconds=0.05)
    with pytest.raises(StarvedError, match=r"3 groups in a row were lost.*time limit: raise episode.seconds"):
        asyncio.run(asyncio.wait_for(rig.loop.run(), 20))
    assert not rig.trainer.batches
    rig.ledger.check()


def test_tasks_that_are_all_too_easy_end_the_run_and_are_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path, skill=lambda version: 1.0)
    with pytest.raises(StarvedError, match=r"40 groups in a row .* 100% solved"):
        asyncio.run(rig.loop.run())
    closed(rig)


def test_fewer_tasks_than_steps_end_the_run_early_and_well(tmp_path: Path) -> None:
    plan = Plan(steps=50, groups_per_batch=1, samples_per_group=8)
    rig = Rig(tmp_path, curriculum=Counting(limit=5), plan=plan)
    asyncio.run(rig.loop.run())
    assert 1 <= rig.loop.step <= 5
    assert rig.buffer.outstanding == 0
    closed(rig)


class Broken(Counting):
    """A curriculum that fails at its sixth task."""

    def next_task(self):  # type: ignore[no-untyped-def]
        if self.given == 5:
            raise LookupError("the tasks' disk is gone")
        return super().next_task()


def test_a_producer_that_fails_reaches_the_trainer_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, curriculum=Broken(), plan=Plan(steps=50, groups_per_batch=2, samples_per_group=4))
    with pytest.raises(LookupError, match="disk is gone"):
        asyncio.run(asyncio.wait_for(rig.loop.run(), 10))
    closed(rig)


DYING = """
import asyncio, sys, time
from pathlib import Path
from tests.rl.harness import Rig
from tests.rl.test_loop import Broken

class Timed(Broken):
    def next_task(self):
        if self.given == 5:
            print(time.monotonic(), flush=True)
        return super().next_task()

rig = Rig(Path(sys.argv[1]), curriculum=Timed())
try:
    asyncio.run(rig.loop.run())
finally:
    print(time.monotonic(), flush=True)
"""


def test_a_producers_death_ends_the_process_non_zero_with_the_traceback(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    died, ended = map(float, done.stdout.split())
    assert ended - died < 1.0
    assert done.returncode == 1
    assert "in next_task" in done.stderr
    assert done.stderr.strip().endswith("LookupError: the tasks' disk is gone")


def test_a_feed_that_returns_early_is_an_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def returns() -> None:
        return

    async def never() -> None:
        await asyncio.Event().wait()

    async def body() -> None:
        consumer = asyncio.ensure_future(never())
        try:
            with pytest.raises(StarvedError, match="feed ended at step 0 of 4"):
                await rig.loop.outlive(returns(), consumer)
        finally:
            consumer.cancel()

    asyncio.run(body())


def test_a_dead_generator_ends_the_run(tmp_path: Path) -> None:
    def die(batch: Batch) -> None:
        if batch.step == 2:
            rig.generator.die()

    rig = Rig(tmp_path, before_step=die)
    with pytest.raises(GeneratorDead):
        asyncio.run(rig.loop.run())
    rig.ledger.check()


def test_a_step_that_is_not_finite_publishes_nothing(tmp_path: Path) -> None:
    def fail_second(batch: Batch) -> None:
        if batch.step == 2:
            raise NonFiniteStep("staged")

    rig = Rig(tmp_path, before_step=fail_second)
    asyncio.run(rig.loop.run())
    assert (rig.loop.step, rig.loop.version, rig.generator.version) == (4, 3, 3)
    assert rig.ledger.episodes.reasons["non_finite"] > 0
    closed(rig)


def test_steps_that_stay_not_finite_end_the_run(tmp_path: Path) -> None:
    def fail(batch: Batch) -> None:
        raise NonFiniteStep("staged")

    rig = Rig(tmp_path, before_step=fail)
    with pytest.raises(NonFiniteStep):
        asyncio.run(rig.loop.run())
    assert rig.generator.version == 0
    closed(rig)


def test_weights_that_do_not_load_leave_the_old_version_live(tmp_path: Path) -> None:
    rig = Rig(tmp_path, failing_updates=[2])
    with pytest.raises(UpdateFailed):
        asyncio.run(rig.loop.run())
    assert rig.generator.version == 1
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-1"]
    closed(rig)


def test_only_the_live_weights_stay_in_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asyncio.run(rig.loop.run())
    live = tmp_path / "weights" / "version-4"
    assert list((tmp_path / "weights").iterdir()) == [live]
    assert (live / "config.json").read_text() == "{}"


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_a_resumed_run_trains_each_task_exactly_once(tmp_path: Path, stop_at: int) -> None:
    plan = Plan(steps=10, groups_per_batch=2, samples_per_group=4)
    saved = tmp_path / "checkpoints"

    async def until_stopped(rig: Rig) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(rig.loop.run())
            while rig.loop.step < stop_at:
                await asyncio.sleep(0)
            running.cancel()
        await write_checkpoint(saved, rig.trainer, rig.loop.state)

    first = Rig(tmp_path, plan=plan)
    asyncio.run(until_stopped(first))
    first.ledger.check()
    checkpoint = newest_checkpoint(saved)
    assert checkpoint is not None
    state = read_state(checkpoint)
    assert state.step == stop_at
    curriculum = Counting()
    curriculum.load_state_dict(state.curriculum)
    second = Rig(tmp_path, plan=plan, curriculum=curriculum, resumed=state, seed=7)

    asyncio.run(second.go_on(checkpoint))
    trained = first.trained + second.trained
    assert len(trained) == len(set(trained)) == 20
    heard = [key for key, _ in [*first.curriculum.heard, *curriculum.heard]]  # type: ignore[attr-defined]
    assert len(heard) == len(set(heard))
    # No task fell through the gap: whatever the first run gave out, it settled or the second one played.
    given = {f"train/sums/2/{number}" for number in range(1, state.curriculum["given"] + 1)}
    assert given <= set(heard) | {task.key for task in second.loop.state(second.loop.version).pending}
    assert max(row["off_policy/max"] for row in second.rows) <= 1


def test_a_deadline_stops_before_a_step_that_would_pass_it(tmp_path: Path) -> None:
    plan = Plan(steps=10, groups_per_batch=2, samples_per_group=4, deadline=time.monotonic() - 1.0)
    rig = Rig(tmp_path, plan=plan)
    asyncio.run(rig.loop.run())
    assert rig.loop.step == 0
    rig.ledger.check()


def test_a_deadline_ends_the_wait_for_a_batch_that_does_not_come(tmp_path: Path) -> None:
    plan = Plan(steps=10, groups_per_batch=2, samples_per_group=4, deadline=time.monotonic() + 0.3)
    closed = asyncio.Event()
    rig = Rig(tmp_path, plan=plan, gate=lambda: closed)
    asyncio.run(asyncio.wait_for(rig.loop.run(), 30))
    assert rig.loop.step == 0
    rig.ledger.check()


def test_tokens_without_a_sampler_logprob_are_accounted_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asyncio.run(rig.loop.run())
    trained = rig.ledger.tokens.fates[Fate.TRAINED]
    assert trained == sum(batch.trained_count for batch in rig.trainer.batches)
