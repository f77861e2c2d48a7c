"""Many attempts at many tasks on stand-ins: what has no verdict is counted by cause, never as a failure."""

from __future__ import annotations

import asyncio

import pytest

from rl.attempts import Attempts, Tempered, attempt_all
from rl.dialogue import Dialogue
from rl.errors import ConfigError
from rl.generator import Generation, Sampling
from rl.generators.fake import ByteTokenizer, sums_reply
from rl.ledger import Ledger, MeteredGenerator
from rl.passk import Tally
from rl.player import Player
from rl.rollout import Rollout
from rl.types import TokenIds
from tests.rl.harness import LIMITS, SOURCE, AddingSandboxes
from tests.rl.test_rollout import Recorder

TASKS = [SOURCE.held_out("sums", level, seed) for level in (1, 2) for seed in range(3)]


class Policy(Recorder):
    """Adds well half of the time."""

    def __init__(self) -> None:
        super().__init__()
        reply = sums_reply(lambda version: 0.5)
        self.inner = type(self.inner)(ByteTokenizer(), reply, seed=3)


class Refused(Policy):
    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        raise ConfigError("the endpoint answered 404")


def attempt(generator: Policy, sandboxes: AddingSandboxes, samples: int = 4) -> tuple[Attempts, Ledger]:
    async def body() -> tuple[Attempts, Ledger]:
        ledger = Ledger()
        drawn = MeteredGenerator(Tempered(generator, 0.7, 0.9), ledger)
        rollout = Rollout(drawn, sandboxes, Dialogue(ByteTokenizer()), SOURCE, limits=LIMITS)
        player = Player(rollout, ledger, concurrent=8, episode_seconds=10)
        return await attempt_all(player, TASKS, samples), ledger

    return asyncio.run(body())


def test_attempts_without_a_verdict_are_counted_apart() -> None:
    generator = Policy()
    attempts, ledger = attempt(generator, AddingSandboxes(lose=lambda number: number % 6 == 0))
    ledger.check()
    made = attempts.as_dict((1, 2))
    assert made["attempts"] == 24
    assert made["unscored"] == {"SANDBOX_LOST in exec": 4}
    assert made["scored"] == 20
    assert made["stop_reasons"] == {"completed": 20, "interrupted": 4}
    assert sum(tally.scored for tally in attempts.tallies()) == 20
    assert sum(row["rewards"].count(None) for row in made["tasks"]) == 4
    assert set(made["pass_at_k"]) == {"all", "sums/1", "sums/2"}
    assert {(drawn.temperature, drawn.top_p) for drawn in generator.samplings} == {(0.7, 0.9)}


def test_every_attempt_is_tallied_with_its_task() -> None:
    attempts, _ = attempt(Policy(), AddingSandboxes())
    for tally, episodes in zip(attempts.tallies(), attempts.episodes, strict=True):
        assert tally == Tally(4, sum(episode.reward == 1.0 for episode in episodes))
    assert [episodes[0].task for episodes in attempts.episodes] == TASKS
    assert len(attempts.tallies("sums/1")) == 3


def test_what_ends_the_evaluation_comes_bare() -> None:
    with pytest.raises(ConfigError, match="404"):
        attempt(Refused(), AddingSandboxes())
