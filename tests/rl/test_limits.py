"""Limits and stop reasons: what runs out of time is typed and never a verdict, and blocks nobody else."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from rl.bench.virtual import run_virtual
from rl.boxes import Box
from rl.generator import ContextTooLong, Generation, GeneratorUnavailable, Sampling
from rl.ledger import Ledger
from rl.player import Player
from rl.referee import Referee
from rl.rollout import Limits, Rollout
from rl.sandboxes import DaemonSandboxes
from rl.side_loop import SideLoop
from rl.tasks import Problem, Rules, Sandboxed, TaskSource
from rl.types import Cancelled, Episode, Scored, StopReason, Task, TokenIds, Truncated, Unscored
from sandboxd import ExecResult
from tests.rl.box_kit import fake_sandboxes
from tests.rl.test_rollout import DIALOGUE, LIMITS, TASK, Recorder, Scripted, play, printed, verify

CALL, ANSWER = "print(42)\n```\n", "42"


def judged(verifier: Callable[[Task, str], float], limits: Limits = LIMITS) -> Episode:
    rollout = Rollout(Recorder(CALL, ANSWER), Scripted(printed("42")), DIALOGUE, verifier, limits=limits)
    return asyncio.run(rollout.run(TASK))


class Failing(Recorder):
    """Its second request fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__(CALL, ANSWER)
        self._error = error

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        if self.contexts:
            raise self._error
        return await super().generate(context_ids, sampling)


class Hanging(Scripted):
    """A sandbox whose command does not come back, whatever its time limit says."""

    async def exec(self, argv: Sequence[str], *, timeout: float, output_limit: int) -> ExecResult:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ((CALL, "```python\nprint(42)"), StopReason.PARSE_ERROR),
        (("print(42)",), StopReason.PARSE_ERROR),
        ((CALL, "The answer: ```41```"), StopReason.COMPLETED),
        ((CALL, "41"), StopReason.COMPLETED),
    ],
)
def test_a_call_that_is_not_closed_is_told_from_an_answer(turns: Sequence[str], reason: StopReason) -> None:
    episode = play(Recorder(*turns), Scripted(printed("42")))
    assert (episode.stop_reason, episode.outcome) == (reason, Scored(0.0))


def test_a_turn_beyond_its_time_is_a_timeout_and_no_verdict() -> None:
    generator = Recorder(CALL, gate=asyncio.Event)
    episode = play(generator, Scripted(), Limits(turn_tokens=200, context_tokens=4000, turn_seconds=0.02))
    assert episode.outcome == Unscored("TIMEOUT", "generate", "generate took longer than 0.02 s")
    assert (episode.stop_reason, episode.turns) == (StopReason.TIMEOUT, ())


def test_a_sandbox_that_outlasts_the_commands_own_limit_is_given_up() -> None:
    limits = Limits(turn_tokens=200, context_tokens=4000, code_seconds=0.01, tool_slack_seconds=0.01)
    sandboxes = Hanging()
    episode = play(Recorder(CALL), sandboxes, limits)
    assert episode.outcome == Unscored("TIMEOUT", "exec", "exec took longer than 0.02 s")
    assert episode.stop_reason is StopReason.TIMEOUT
    assert (sandboxes.acquired, sandboxes.released) == (1, 1)


def test_an_episode_beyond_its_time_is_cancelled_by_a_timeout() -> None:
    async def body() -> None:
        sandboxes = Hanging()
        rollout = Rollout(Recorder(CALL), sandboxes, DIALOGUE, verify, limits=LIMITS)
        played = await Player(rollout, Ledger(), concurrent=1, episode_seconds=30.0).play(TASK)
        assert played.episode.outcome == Cancelled("timeout")
        assert played.episode.stop_reason is StopReason.TIMEOUT
        assert sandboxes.released == 1

    run_virtual(body())


def test_a_verifier_beyond_its_time_leaves_the_episode_unscored() -> None:
    let_go = threading.Event()

    def hang(task: Task, answer: str) -> float:
        let_go.wait(30)
        return 1.0

    episode = judged(hang, Limits(turn_tokens=200, context_tokens=4000, verify_seconds=0.02))
    let_go.set()
    assert episode.outcome == Unscored("TIMEOUT", "verify", "sums took longer than 0.02 s to verify")
    assert episode.stop_reason is StopReason.COMPLETED, "the model had ended before"
    assert len(episode.turns) == 2


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ValueError("no number\nin it"), "sums: ValueError: no number"),
        (SystemExit(3), "sums: SystemExit: 3"),
        (StopIteration(), "sums: StopIteration: "),
        (TimeoutError("a socket's"), "sums: TimeoutError: a socket's"),
    ],
)
def test_a_verifier_that_fails_is_no_zero(error: BaseException, detail: str) -> None:
    def broken(task: Task, answer: str) -> float:
        raise error

    episode = judged(broken)
    assert episode.outcome == Unscored("VERIFIER", "verify", detail)
    assert episode.reward is None


@pytest.mark.parametrize("reward", [1.5, -1.0, float("nan")])
def test_a_reward_outside_of_its_range_is_no_reward(reward: float) -> None:
    outcome = judged(lambda task, answer: reward).outcome
    assert outcome == Unscored("VERIFIER", "verify", f"sums gave {reward}; a reward lies in [0, 1]")


def test_a_request_that_fails_for_good_leaves_the_episode_unscored() -> None:
    episode = play(Failing(GeneratorUnavailable("503, six times")), Scripted(printed("42")))
    assert episode.outcome == Unscored("GENERATOR", "generate", "503, six times")
    assert episode.stop_reason is StopReason.INTERRUPTED


def test_a_generator_that_finds_the_dialogue_too_long_cuts_it() -> None:
    episode = play(Failing(ContextTooLong("4097 tokens")), Scripted(printed("42")))
    assert episode.outcome == Truncated(StopReason.CONTEXT_OVERFLOW, 0.0)


class Troubled(Sandboxed):
    """`trouble` is what its code does in the stage of that name."""

    name = "troubled"
    levels = ("only",)
    rules = Rules(answer="state")

    def __init__(self, **trouble: Callable[[], object]) -> None:
        self._trouble = trouble

    def make(self, level: int, rng: random.Random) -> Problem:
        return Problem(f"Do {rng.randint(1, 999)}.", "")

    async def prepare(self, task: Task, box: Box) -> None:
        self._trouble.get("prepare", lambda: None)()

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        self._trouble.get("judge", lambda: None)()
        await box.read_file("nothing-here")
        return 1.0


class Written(Troubled):
    """Its judge finds a file that it has put there itself."""

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        await box.write_file("nothing-here", b"")
        return await super().judge(task, answer, box)


def fail() -> None:
    raise KeyError("a bug")


def be_cancelled() -> None:
    """As by waiting for what it has cancelled itself."""
    raise asyncio.CancelledError("by itself")


@pytest.mark.parametrize(
    ("family", "outcome"),
    [
        (Troubled(prepare=fail), Unscored("VERIFIER", "prepare", "troubled: KeyError: 'a bug'")),
        (Troubled(judge=fail), Unscored("VERIFIER", "verify", "troubled: KeyError: 'a bug'")),
        (Troubled(judge=be_cancelled), Unscored("VERIFIER", "verify", "troubled: CancelledError: by itself")),
    ],
)
def test_a_tasks_own_code_that_fails_in_the_sandbox_is_no_zero(
    tmp_path: Path, family: Troubled, outcome: Unscored
) -> None:
    source = TaskSource([family])

    async def body() -> Episode:
        async with fake_sandboxes(tmp_path) as sandboxes:
            rollout = Rollout(Recorder(CALL, "Done."), sandboxes, DIALOGUE, source, limits=LIMITS)
            return await rollout.run(source.train("troubled", 0, 0))

    assert asyncio.run(body()).outcome == outcome


def test_blocking_verifiers_leave_the_event_loop_alone() -> None:
    """64 verifiers block until all of them do and another episode has been played: in a pool of six threads,
    or on the loop, they would block for ever."""
    all_of_them, go = threading.Barrier(64, timeout=30.0), threading.Event()
    threads: set[int] = set()

    def block(task: Task, answer: str) -> float:
        threads.add(threading.get_ident())
        all_of_them.wait()
        go.wait(30)
        return verify(task, answer)

    def rollout(verifier: Callable[[Task, str], float]) -> Rollout:
        return Rollout(Recorder(CALL, ANSWER), Scripted(printed("42")), DIALOGUE, verifier, limits=LIMITS)

    async def body() -> list[Episode]:
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(rollout(block).run(TASK)) for _ in range(64)]
            other = await rollout(verify).run(TASK)
            go.set()
        return [other, *(job.result() for job in playing)]

    episodes = asyncio.run(body())
    assert [episode.outcome for episode in episodes] == [Scored(1.0)] * 65
    assert len(threads) == 64
    assert threading.get_ident() not in threads


def test_blocking_code_in_the_sandbox_leaves_the_event_loop_alone(tmp_path: Path) -> None:
    """One judge blocks until an episode without such a judge has been played; the one behind it is scored,
    too. No code of the family runs in the loop's thread."""
    go = threading.Event()
    threads: set[int] = set()

    def block() -> None:
        threads.add(threading.get_ident())
        go.wait(30)

    def note() -> None:
        threads.add(threading.get_ident())

    source = TaskSource([Written(prepare=note, judge=block)])

    async def body() -> list[Episode]:
        async with fake_sandboxes(tmp_path) as sandboxes, asyncio.TaskGroup() as group:
            blocked = [
                group.create_task(
                    Rollout(Recorder(CALL, "Done."), sandboxes, DIALOGUE, source, limits=LIMITS).run(
                        source.train("troubled", 0, number)
                    )
                )
                for number in range(2)
            ]
            other = Rollout(Recorder(CALL, ANSWER), sandboxes, DIALOGUE, verify, limits=LIMITS)
            first = await other.run(TASK)
            go.set()
        return [first, *(job.result() for job in blocked)]

    assert [episode.outcome for episode in asyncio.run(body())] == [Scored(1.0)] * 3
    assert threading.get_ident() not in threads


class Exiting(Troubled):
    """Its judge starts a task that ends the interpreter, or would."""

    async def judge(self, task: Task, answer: str, box: Box) -> float:
        async def leave() -> None:
            raise SystemExit(3)

        self._left = asyncio.create_task(leave())
        # Heard of: else it would be told of by the garbage collector, in the midst of whatever runs then.
        self._left.add_done_callback(lambda left: left.exception())
        await asyncio.Event().wait()
        raise AssertionError


def test_an_exit_in_a_task_of_the_code_ends_its_episode_and_no_other(tmp_path: Path) -> None:
    async def body() -> list[Episode]:
        async with fake_sandboxes(tmp_path) as sandboxes:
            played = []
            side = SideLoop()
            for family in (Exiting(), Written()):
                source = TaskSource([family])
                referee = Referee(source, 20.0, side)
                rollout = Rollout(Recorder(CALL, "Done."), sandboxes, DIALOGUE, referee, limits=LIMITS)
                async with asyncio.timeout(20):
                    played.append(await rollout.run(source.train("troubled", 0, 0)))
            return played

    first, second = asyncio.run(body())
    told = "troubled: RuntimeError: an exit in a task of it ended its loop"
    assert first.outcome == Unscored("VERIFIER", "verify", told)
    assert second.outcome == Scored(1.0)


def test_code_in_the_sandbox_that_blocks_for_good_takes_no_other_with_it(tmp_path: Path) -> None:
    never, blocks = threading.Event(), threading.Event()

    def judge() -> bool:
        blocks.set()
        return never.wait(60)

    family = Written(judge=judge)
    source = TaskSource([family])

    async def body() -> Episode:
        async with fake_sandboxes(tmp_path) as sandboxes:
            limits = Limits(turn_tokens=200, context_tokens=4000, verify_seconds=0.05)
            rollout = Rollout(Recorder(CALL, "Done."), sandboxes, DIALOGUE, source, limits=limits)
            episode = await rollout.run(source.train("troubled", 0, 0))
            await a_loop_that_blocks(sandboxes)
            return episode

    async def a_loop_that_blocks(sandboxes: DaemonSandboxes) -> None:
        side, task = SideLoop(), source.train("troubled", 0, 1)
        async with sandboxes.acquire() as box:
            blocks.clear()
            call = asyncio.create_task(side.call(partial(family.judge, task, ""), box))
            await asyncio.to_thread(blocks.wait, 30)
            call.cancel()
            side.renew()
            assert await side.call(partial(Written().judge, task, ""), box) == 1.0
            with pytest.raises(asyncio.CancelledError):
                await call

    outcome = asyncio.run(body()).outcome
    never.set()
    assert isinstance(outcome, Unscored)
    assert outcome.kind == "TIMEOUT"
