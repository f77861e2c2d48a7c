"""A whole loop on stand-ins: fake generator and trainer, real rollouts, real tasks, sandboxes that add."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl.buffer import GroupBuffer
from rl.checkpoint import LoopState
from rl.curriculum import Curriculum
from rl.dialogue import STYLE, Dialogue, PromptStyle, Tokenizer
from rl.errors import Exhausted
from rl.fakes import FakeTrainer
from rl.generator import Generator
from rl.generators.fake import ByteTokenizer, FakeGenerator, Reply, sums_reply
from rl.ledger import Ledger, MeteredGenerator
from rl.loop import Loop
from rl.metrics import Row
from rl.pace import CountedRollout
from rl.plan import Parts, Plan
from rl.player import Player
from rl.policies import QueueRules, build_policy
from rl.rollout import Limits, Rollout, Sandboxes
from rl.tasks import TaskSource
from rl.tasks.sums import Sums
from rl.types import Batch, Task
from rl.weights import Publisher
from sandboxd import ExecResult
from sandboxd.errors import FileNotFound, SandboxLost
from sandboxd.types import ExitReason

SOURCE = TaskSource([Sums()])
LIMITS = Limits(max_turns=3, turn_tokens=200, context_tokens=4000)


class Counting:
    """A curriculum that gives level-0 sums in order, `limit` of them, and remembers what it heard."""

    def __init__(self, limit: int = 10_000) -> None:
        self.given = 0
        self.limit = limit
        self.heard: list[tuple[str, tuple[float, ...]]] = []

    def next_task(self) -> Task:
        if self.given >= self.limit:
            raise Exhausted(f"all {self.limit} tasks have been given out")
        self.given += 1
        return SOURCE.train("sums", 2, self.given)

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        self.heard.append((task.key, tuple(rewards)))

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


class WithoutFiles:
    """A sandbox in which no file is."""

    async def read_file(self, path: str) -> bytes:
        raise FileNotFound(path)

    async def write_file(self, path: str, data: bytes) -> int:
        raise FileNotFound(path)


class AddingBox(WithoutFiles):
    """Runs `print(a+b+…)`, unless `fate` raises."""

    def __init__(self, fate: Callable[[], None]) -> None:
        self._fate = fate

    async def exec(self, argv: Sequence[str], *, timeout: float, output_limit: int) -> ExecResult:
        self._fate()
        code = argv[-1].strip().removeprefix("print(").removesuffix(")")
        return ExecResult(ExitReason.EXITED, 0, 0, f"{add(code)}\n".encode(), b"", 0.0, 0.0, "")


class AddingSandboxes:
    """`lose` decides, by the number of the lease, which sandboxes die at their first command."""

    def __init__(self, lose: Callable[[int], bool] = lambda number: False) -> None:
        self.counts: Counter[str] = Counter()
        self._lose = lose

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AddingBox]:
        number = self.counts["acquired"]
        self.counts["acquired"] += 1

        def fate() -> None:
            if self._lose(number):
                self.counts["lost"] += 1
                raise SandboxLost(f"sandbox {number} died")

        try:
            yield AddingBox(fate)
        finally:
            self.counts["left"] += 1


def add(expression: str) -> int:
    """The value of a sum of integers."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return value(node.left) + value(node.right)
        assert isinstance(node, ast.Constant)
        assert isinstance(node.value, int)
        return node.value

    return value(ast.parse(expression, mode="eval").body)


@dataclass
class Rig:
    """A loop and all that it is made of."""

    path: Path
    plan: Plan = field(default_factory=lambda: Plan(steps=4, groups_per_batch=2, samples_per_group=4))
    bound: int = 1
    skill: Callable[[int], float] = lambda version: 0.5
    reply: Reply | None = None
    before_step: Callable[[Batch], None] | None = None
    curriculum: Curriculum = field(default_factory=Counting)
    failing_updates: Iterable[int] = ()
    episode_seconds: float = 10.0
    gate: Callable[[], Any] | None = None
    resumed: LoopState | None = None
    concurrent: int = 64
    sandboxes: Sandboxes = field(default_factory=AddingSandboxes)
    code_seconds: float = 5.0
    seed: int = 0
    rules: QueueRules = field(default_factory=QueueRules)
    on_step: Callable[[Row], Awaitable[None]] | None = None
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    given_trainer: FakeTrainer | None = None
    style: PromptStyle = STYLE
    books: Mapping[str, Any] | None = None
    served: Generator | None = None
    segment: Path | None = None

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        self.rows: list[Row] = []
        self.ledger = Ledger(self.books)
        self.trainer = self.given_trainer or FakeTrainer(self.before_step)
        self.generator = FakeGenerator(
            tokenizer,
            self.reply or sums_reply(self.skill),
            seed=self.seed,
            gate=self.gate,
            failing_updates=self.failing_updates,
        )
        limits = replace(LIMITS, code_seconds=self.code_seconds)
        served: Generator = self.served or self.generator
        metered = MeteredGenerator(served, self.ledger)
        self.rollout = CountedRollout(
            Rollout(metered, self.sandboxes, Dialogue(tokenizer, self.style), SOURCE.verify, limits=limits)
        )
        self.player = Player(
            self.rollout, self.ledger, concurrent=self.concurrent, episode_seconds=self.episode_seconds
        )
        model, weights = self.path / "model", self.path / "weights"
        for directory in (model, weights):
            directory.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        self.publisher = Publisher(self.trainer, served, model, weights, self.segment)
        self.buffer = GroupBuffer(build_policy(self.rules, self.bound, self.plan.groups_per_batch))
        parts = Parts(
            curriculum=self.curriculum,
            player=self.player,
            buffer=self.buffer,
            trainer=self.trainer,
            publisher=self.publisher,
            on_step=self._on_step,
        )
        self.loop = Loop(parts, self.plan, self.resumed)

    async def go_on(self, checkpoint: Path) -> None:
        """Runs on from a checkpoint, whose state is `resumed`."""
        assert self.resumed is not None
        await self.trainer.restore(checkpoint)
        await self.publisher.publish(self.resumed.version)
        self.loop.version = self.resumed.version
        await self.loop.run()

    async def _on_step(self, row: Row) -> None:
        self.rows.append(row)
        if self.on_step is not None:
            await self.on_step(row)

    @property
    def trained(self) -> list[str]:
        """Keys of all trained tasks, in order."""
        return [group.task_key for batch in self.trainer.batches for group in batch.groups]
