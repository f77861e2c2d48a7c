"""Queue health in a whole loop: spare groups and attempts, late ones, partial groups, and what it costs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl.errors import StarvedError
from rl.ledger import Fate
from rl.length_bias import LengthBias
from rl.plan import Plan
from rl.policies import QueueRules
from tests.rl.harness import AddingSandboxes, Rig
from tests.rl.test_loop import closed

PLAN = Plan(steps=4, groups_per_batch=2, samples_per_group=4)


class Stragglers:
    """Of every `every` requests for a turn one waits, until there were `until` of them; the others go on."""

    def __init__(self, every: int, until: int = 10**9) -> None:
        self._opened, self._closed = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._every = every
        self._number = 0
        self._until = until

    def gate(self) -> asyncio.Event:
        self._number += 1
        if self._number >= self._until:
            self._closed.set()
        return self._closed if self._number % self._every == 0 else self._opened


def test_spare_attempts_stand_in_for_stragglers(tmp_path: Path) -> None:
    """One turn in 21 never ends, and no limit ends it before the test's. Every group is whole.

    Of attempts that end in the same turn of the event loop all take part.
    """
    plan = Plan(steps=4, groups_per_batch=2, samples_per_group=4, spare_samples=2)
    rig = Rig(tmp_path, plan=plan, gate=Stragglers(21).gate, episode_seconds=1000.0)
    run_within(rig)
    reasons = rig.ledger.episodes.reasons
    assert reasons["cancelled:spare"] > 0
    assert {len(group.samples) for batch in rig.trainer.batches for group in batch.groups} <= {4, 5, 6}
    assert rig.loop.settling.lengths.late_count == reasons["cancelled:spare"]
    assert "queue/length_bias" in rig.rows[-1]
    closed(rig)


def run_within(rig: Rig, seconds: float = 20.0) -> None:
    async def body() -> None:
        async with asyncio.timeout(seconds):
            await rig.loop.run()

    asyncio.run(body())


def test_spare_groups_of_a_synchronous_run_are_given_up(tmp_path: Path) -> None:
    """Oversampling: three groups start, the first two with a signal are trained, the third is given up."""
    rig = Rig(tmp_path, bound=0, plan=PLAN, rules=QueueRules(spare_groups=1))
    run_within(rig)
    assert rig.loop.step == 4
    assert max(row["off_policy/max"] for row in rig.rows) == 0
    assert {len(batch.groups) for batch in rig.trainer.batches} == {2}
    reasons = rig.ledger.episodes.reasons
    assert reasons["stale"] + reasons["cancelled:late"] > 0
    closed(rig)


def test_a_late_group_is_trained_with_the_verdicts_it_has(tmp_path: Path) -> None:
    """A turn in 13 never ends. Groups that miss an attempt are cut once the trainer has nothing else."""
    rules = QueueRules("drop_late", min_samples=2)
    rig = Rig(tmp_path, plan=PLAN, rules=rules, gate=Stragglers(13).gate, episode_seconds=1000.0, skill=_half)
    run_within(rig)
    assert rig.loop.step == 4
    sizes = [len(group.samples) for batch in rig.trainer.batches for group in batch.groups]
    assert 2 <= min(sizes) < 4
    assert rig.ledger.episodes.reasons["cancelled:late"] > 0
    assert max(row["off_policy/max"] for row in rig.rows) <= 1
    closed(rig)


def _half(version: int) -> float:
    return 0.5


def test_a_running_group_that_a_step_makes_too_old_is_given_up_and_its_sandboxes_are_free(
    tmp_path: Path,
) -> None:
    """With `min_samples` of all four a group that misses one cannot be cut, only given up."""
    plan = Plan(steps=6, groups_per_batch=1, samples_per_group=4, min_samples=4)
    rules = QueueRules("drop_late", min_samples=4)
    rig = Rig(tmp_path, plan=plan, rules=rules, gate=Stragglers(25).gate, episode_seconds=1000.0)
    run_within(rig)
    assert rig.loop.step == 6
    assert rig.ledger.episodes.reasons["stale"] > 0
    assert rig.ledger.episodes.reasons["cancelled:late"] > 0
    assert {len(group.samples) for batch in rig.trainer.batches for group in batch.groups} == {4}
    closed(rig)


def test_groups_that_infrastructure_leaves_too_small_are_replaced(tmp_path: Path) -> None:
    plan = Plan(steps=4, groups_per_batch=2, samples_per_group=4, min_samples=4)
    rig = Rig(tmp_path, plan=plan, sandboxes=AddingSandboxes(lambda number: number % 9 == 0))
    run_within(rig)
    assert rig.buffer.dropped["partial"] > 0
    assert rig.ledger.episodes.reasons["partial"] == 3 * rig.buffer.dropped["partial"]
    assert {len(group.samples) for batch in rig.trainer.batches for group in batch.groups} == {4}
    closed(rig)


def test_infrastructure_that_always_takes_one_of_a_whole_group_ends_the_run(tmp_path: Path) -> None:
    plan = Plan(steps=4, groups_per_batch=1, samples_per_group=4, min_samples=4)
    rig = Rig(tmp_path, plan=plan, sandboxes=AddingSandboxes(lambda number: number % 4 == 0))
    with pytest.raises(StarvedError, match=r"3 groups in a row were lost.*SANDBOX_LOST"):
        run_within(rig)
    closed(rig)


@pytest.mark.parametrize("seed", range(3))
def test_in_order_trains_tasks_as_they_were_given_out(tmp_path: Path, seed: int) -> None:
    rig = Rig(tmp_path, plan=PLAN, rules=QueueRules("in_order"), skill=_half, seed=seed)
    run_within(rig)
    numbers = [int(key.rpartition("/")[2]) for key in rig.trained]
    assert numbers == sorted(numbers)
    closed(rig)


@pytest.mark.parametrize("rules", [QueueRules("in_order"), QueueRules(), QueueRules("drop_late")])
def test_in_each_policy_the_bound_holds_and_the_books_close(tmp_path: Path, rules: QueueRules) -> None:
    gate = Stragglers(10, until=16).gate
    rig = Rig(tmp_path, plan=PLAN, rules=rules, gate=gate, episode_seconds=1000.0)
    run_within(rig)
    assert rig.loop.step == 4
    assert max(row["off_policy/max"] for row in rig.rows) <= 1
    closed(rig)


def test_length_bias_is_what_is_missing_of_the_mean_length() -> None:
    lengths = LengthBias()
    assert (lengths.row(), lengths.bias) == ({}, 0.0)
    lengths.note(100, Fate.TRAINED, "")
    lengths.note(50, Fate.DISCARDED, "zero_advantage")
    assert lengths.row() == {}, "what was dropped for its rewards says nothing about lengths"
    lengths.note(300, Fate.DISCARDED, "cancelled:late")
    assert lengths.row() == {"queue/late_share": 0.5, "queue/length_bias": pytest.approx(-0.5)}
