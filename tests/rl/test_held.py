"""What docs/rl_failures.md says of groups, queues and ages, held over whole runs in which much goes wrong."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.config import TrainerConfig
from rl.errors import StarvedError
from rl.frames import encode
from rl.generator import Generation, Generator, GeneratorStats, Sampling
from rl.generators.fake import ByteTokenizer, FakeGenerator, sums_reply
from rl.group_play import GroupPlay
from rl.ledger import Fate, Ledger
from rl.metrics import Row
from rl.plan import Plan
from rl.player import Player
from rl.policies import QueueRules
from rl.sieve import STALE_BATCHES, Sieve
from rl.trainer_process import TrainerProcess, start_trainer
from rl.types import Batch, Episode, Group, Scored, StopReason, Task, TokenIds, Turn, VersionSpan
from tests.rl.harness import SOURCE, AddingSandboxes, Counting, Rig
from tests.rl.test_loop import closed
from tests.rl.test_queue import Stragglers, run_within

PLAN = Plan(steps=6, groups_per_batch=2, samples_per_group=4, min_samples=3)


class Told(Rig):
    """Remembers what the loop said became of its tasks, as `tasks.jsonl` has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fates: list[str] = []

    async def _on_step(self, row: Row) -> None:
        self._listen()
        await super()._on_step(row)

    def _listen(self) -> None:
        told = self.loop.account_of_step()
        self.fates += [*told["trained"], *told["dropped"]]

    def end(self) -> Counter[str]:
        """How often each task met a fate: trained, dropped with a reason, or still to come."""
        state = self.loop.state(self.loop.version)
        return Counter([*self.fates, *state.dropped, *(task.key for task in state.pending)])


@pytest.mark.parametrize("policy", ["in_order", "windowed", "drop_late"])
def test_every_group_ends_once_whatever_meets_its_episodes(tmp_path: Path, policy: Any) -> None:
    """Attempts that never return, sandboxes that die, groups too small, silent or given up: each task that
    was given out is trained once, or dropped once with its reason, or still to come."""
    rig = Told(
        tmp_path,
        plan=PLAN,
        rules=QueueRules(policy, min_samples=PLAN.min_samples),
        gate=Stragglers(29).gate,
        sandboxes=AddingSandboxes(lambda number: number % 11 == 0),
        episode_seconds=0.2,
    )
    # On a machine that stands still for a moment all of them run out of time, which may end the run early.
    with suppress(StarvedError):
        run_within(rig)
    assert isinstance(rig.curriculum, Counting)
    given = Counter(SOURCE.train("sums", 2, number).key for number in range(1, rig.curriculum.given + 1))
    assert rig.end() == given
    assert rig.buffer.dropped.total() > 0
    closed(rig)


class Aged:
    """A generator that notes what it has written, and with which weights the oldest token of it."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner
        self.written: list[tuple[bytes, int]] = []

    @property
    def version(self) -> int:
        return self._inner.version

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        generation = await self._inner.generate(context_ids, sampling)
        text = context_ids.tobytes() + generation.ids.tobytes()
        self.written.append((text, min(span.version for span in generation.spans)))
        return generation

    async def update_weights(self, path: Path, version: int) -> None:
        await self._inner.update_weights(path, version)

    def stats(self) -> GeneratorStats:
        return self._inner.stats()


@pytest.mark.parametrize("policy", ["in_order", "windowed", "drop_late"])
@pytest.mark.parametrize("bound", [1, 2])
def test_no_trained_token_is_older_than_the_bound_however_long_it_waited(
    tmp_path: Path, policy: Any, bound: int
) -> None:
    """Token by token, against what the generator itself says: time in the queue counts."""
    gate = Stragglers(7, until=24).gate
    served = Aged(FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 0.5), gate=gate))
    ages: list[int] = []

    def look(batch: Batch) -> None:
        for group in batch.groups:
            for sample in group.samples:
                whole = group.prompt_ids.tobytes() + sample.ids.tobytes()
                versions = [version for text, version in served.written if whole.startswith(text)]
                ages.append(rig.publisher.version - min(versions))

    plan = Plan(steps=8, groups_per_batch=2, samples_per_group=4, min_samples=3)
    rules = QueueRules(policy, min_samples=3)
    rig = Rig(tmp_path, plan=plan, bound=bound, rules=rules, served=served, before_step=look)
    run_within(rig)
    assert rig.loop.step == 8
    assert 0 < max(ages) <= bound
    assert min(ages) >= 0
    rig.ledger.check()


def group_of(*rewards: float) -> tuple[GroupPlay, Group]:
    task = SOURCE.train("sums", 0, 1)
    play = GroupPlay(Player(Unplayed(), Ledger(), concurrent=1, episode_seconds=1.0), task, PLAN.group_rules)
    ids = np.array([1], np.int32)
    turns = (Turn(ids, np.zeros(1, np.float32), (VersionSpan(0, 0, 1),), ids[:0]),)
    episodes = tuple(Episode(task, turns, Scored(each), StopReason.COMPLETED, 0.0, 0.0) for each in rewards)
    return play, Group(task, ids, episodes)


class Unplayed:
    """A rollout that is asked for nothing."""

    def prompt(self, task: Task) -> TokenIds:
        raise AssertionError

    async def run(self, task: Task) -> Episode:
        raise AssertionError


def test_an_attempt_that_nobody_cancelled_does_not_take_its_group_away_without_a_word() -> None:
    class Cancelling(Unplayed):
        async def run(self, task: Task) -> Episode:
            raise asyncio.CancelledError

    async def body() -> None:
        player = Player(Cancelling(), Ledger(), concurrent=8, episode_seconds=20.0)
        play = GroupPlay(player, SOURCE.train("sums", 0, 1), PLAN.group_rules)
        await play.run(lambda: None, lambda count: None)

    with pytest.raises(RuntimeError, match=r"an attempt at train/sums/0/1 was cancelled, and by nobody"):
        asyncio.run(body())


def test_batches_without_a_step_leave_the_count_of_stale_groups_alone() -> None:
    """Silent groups, and steps that trained nothing, are no sign that anything is young enough."""
    sieve = Sieve(PLAN)
    most = STALE_BATCHES * PLAN.groups_per_batch
    for _ in range(most - 1):
        sieve.count_stale()
    assert sieve.judge(*group_of(1.0, 1.0, 1.0)) == "zero_advantage"
    assert sieve.judge(*group_of(1.0, 0.0, 1.0)) is None
    assert not sieve.is_hopeless()
    with pytest.raises(StarvedError, match=f"{most} groups in a row were too old"):
        sieve.count_stale()
    sieve.trained()
    sieve.count_stale()


def test_a_run_that_ends_with_a_full_queue_returns(tmp_path: Path) -> None:
    """After its last step all slots are taken by groups that nobody will read."""
    plan = Plan(steps=2, groups_per_batch=2, samples_per_group=4)

    async def until_full(row: Row) -> None:
        while rig.buffer.depth < 2 * plan.groups_per_batch:
            await asyncio.sleep(0)

    rig = Rig(tmp_path, plan=plan, bound=2, on_step=until_full)
    run_within(rig)
    assert rig.loop.step == 2
    assert rig.ledger.episodes.fates[Fate.LEFT_OVER] >= 4 * 2 * plan.groups_per_batch
    closed(rig)


LOUD = """#!{python}
import sys
sys.stdout.buffer.write({first!r})
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
for _ in range(64):
    sys.stdout.buffer.write({frame!r})
"""


def test_a_trainer_that_ends_with_unread_replies_is_not_waited_for_in_vain(tmp_path: Path) -> None:
    """4 MiB of them, more than a pipe holds: they are read while the process is joined, so it can end."""
    program = tmp_path / "trainer"
    first, frame = encode((1, None, None)), encode((7, None, b"x" * (1 << 16)))
    program.write_text(LOUD.format(python=sys.executable, first=first, frame=frame))
    program.chmod(0o755)

    async def body() -> TrainerProcess:
        async with asyncio.timeout(30), start_trainer(tmp_path / "log", str(program)) as trainer:
            # The answer to a first call: the interpreter has started, however long that takes.
            await trainer.load(tmp_path, TrainerConfig())
        return trainer

    assert asyncio.run(body()).exit_code == 0
