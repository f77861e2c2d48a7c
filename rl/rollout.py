"""One episode: the model writes Python, a leased sandbox runs it, the output goes back, a verifier scores.

Consumes a task and its prompt; waits for the generator and the sandbox; produces an `Episode`. It raises
only for what ends the whole run (the generator is dead, the caller cancels): a task that fails is a
reward, a sandbox that fails is `Unscored`, and the two never mix.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from rl import tracing
from rl.boxes import Box, ExecResult, Sandboxes
from rl.dialogue import FENCE, Dialogue
from rl.generator import ContextTooLong, Generation, Generator, GeneratorUnavailable, Sampling
from rl.referee import Judge, Referee, VerifierFailed, Verify
from rl.tasks.sandboxed import Rules
from rl.types import Episode, Outcome, Scored, StopReason, Task, TokenIds, Truncated, Turn, Unscored
from sandboxd.errors import InvalidRequest, PoolNotFound, SandboxdError

__all__ = ["Box", "ExecResult", "Limits", "Rollout", "Sandboxes", "describe"]

Result = TypeVar("Result")
RULES = Rules()
OUTPUT_LIMIT_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use.

    `turn_tokens` bounds one sampled turn and `context_tokens` the whole dialogue; `output_chars` what of a
    run's output the model sees. In seconds: `turn_seconds` for sampling one turn; `code_seconds` for one run
    of code, which the sandbox ends, and the model is told; `tool_slack_seconds` what a run may take on top of
    that before the sandbox is given up; `verify_seconds` for each call of the task's own code.
    """

    max_turns: int = 3
    turn_tokens: int = 64
    context_tokens: int = 1024
    output_chars: int = 160
    turn_seconds: float = 120.0
    code_seconds: float = 5.0
    tool_slack_seconds: float = 60.0
    verify_seconds: float = 30.0


class OutOfTime(RuntimeError):
    """A turn or a command outlasted its limit. `stage` is `generate` or `exec`."""

    def __init__(self, stage: str, seconds: float) -> None:
        super().__init__(f"{stage} took longer than {seconds:g} s")
        self.stage = stage


@dataclass(slots=True)
class _Attempt:
    """One episode as far as it has come."""

    task: Task
    rules: Rules
    dialogue: Dialogue
    lease: AsyncExitStack
    context: array[int]
    turns: list[Turn] = field(default_factory=list)
    box: Box | None = None
    calls: int = 0
    tool_seconds: float = 0.0
    stopped: StopReason = StopReason.INTERRUPTED


class Rollout:
    """Plays episodes. It keeps no state between them, so any number may run at once.

    `judge` is a `TaskSource`, or a function of task and answer when no family is judged in the sandbox, or a
    referee that has one.
    """

    def __init__(
        self,
        generator: Generator,
        sandboxes: Sandboxes,
        dialogue: Dialogue,
        judge: Judge | Verify | Referee,
        *,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator = generator
        self._sandboxes = sandboxes
        self._dialogue = dialogue
        self._dialogues: dict[str, Dialogue] = {}
        self._referee = judge if isinstance(judge, Referee) else Referee(judge, limits.verify_seconds)
        self._limits = limits
        self._clock = clock

    def prompt(self, task: Task) -> TokenIds:
        """The prompt of a task, shared by all attempts at it."""
        return self._dialogue_for(task).prompt(task.question)

    async def run(self, task: Task) -> Episode:
        """Play one episode. Raises GeneratorDead when the engine is gone, PoolNotFound when misconfigured."""
        with tracing.episode(task) as span:
            episode = await self._run(task)
            tracing.ended(span, episode)
            return episode

    async def _run(self, task: Task) -> Episode:
        started = self._clock()
        lease = AsyncExitStack()
        attempt = _Attempt(
            task, self._rules(task), self._dialogue_for(task), lease, array("i", self.prompt(task).tobytes())
        )
        try:
            async with lease:
                outcome = await self._play(attempt)
        except PoolNotFound:
            raise
        except SandboxdError as error:
            outcome = Unscored(error.reason, str(error.phase or "exec"), _line(error.message))
        except VerifierFailed as error:
            outcome = Unscored("TIMEOUT" if error.timed_out else "VERIFIER", error.stage, _line(str(error)))
        except GeneratorUnavailable as error:
            outcome = Unscored("GENERATOR", "generate", _line(str(error)))
        except OutOfTime as error:
            attempt.stopped = StopReason.TIMEOUT
            outcome = Unscored("TIMEOUT", error.stage, str(error))
        return Episode(
            task=task,
            turns=tuple(attempt.turns),
            outcome=outcome,
            stop_reason=attempt.stopped,
            wall_seconds=self._clock() - started,
            tool_seconds=attempt.tool_seconds,
        )

    def _rules(self, task: Task) -> Rules:
        family = self._referee.sandboxed(task)
        return RULES if family is None else family.rules

    def _dialogue_for(self, task: Task) -> Dialogue:
        if self._referee.sandboxed(task) is None:
            return self._dialogue
        if task.family not in self._dialogues:
            self._dialogues[task.family] = self._dialogue.styled(self._rules(task).style)
        return self._dialogues[task.family]

    async def _play(self, attempt: _Attempt) -> Outcome:
        for turns_left in reversed(range(self._limits.max_turns)):
            room = self._limits.context_tokens - len(attempt.context)
            if room < 1:
                return await self._cut(attempt, StopReason.CONTEXT_OVERFLOW)
            try:
                generation = await self._sample(attempt, min(room, self._limits.turn_tokens))
            except ContextTooLong:
                return await self._cut(attempt, StopReason.CONTEXT_OVERFLOW)
            text = attempt.dialogue.text(generation.ids, first=len(attempt.turns) == 1)
            code = attempt.dialogue.find_code(text)
            if code is None and generation.finish_reason == "length":
                return await self._cut(attempt, StopReason.MAX_TOKENS)
            if code is None:
                return await self._answered(attempt, text)
            if attempt.rules.answer == "code":
                attempt.stopped = StopReason.TOOL_STOPPED
                box = await self._box(attempt)
                return Scored(await self._referee.judge(attempt.task, code, box))
            if not turns_left:
                return await self._cut(attempt, StopReason.MAX_TURNS)
            await self._call(attempt, code)
        raise AssertionError("max_turns is at least 1, so the loop has returned")

    async def _answered(self, attempt: _Attempt, text: str) -> Outcome:
        """The model has ended its last turn without a call that can be read."""
        unclosed = text.count(FENCE) % 2 == 1
        attempt.stopped = StopReason.PARSE_ERROR if unclosed else StopReason.COMPLETED
        if not attempt.calls:
            # The task is to use the tool: an answer that no run stands behind is a guess.
            return Scored(0.0)
        if self._referee.sandboxed(attempt.task) is None:
            return Scored(await self._referee.verify(attempt.task, text))
        answer = "" if attempt.rules.answer == "state" else text
        return Scored(await self._referee.judge(attempt.task, answer, await self._box(attempt)))

    async def _cut(self, attempt: _Attempt, reason: StopReason) -> Outcome:
        """A dialogue that ran into a limit holds no finished answer, so there is nothing to reward but the
        state of the sandbox, where that is the answer."""
        attempt.stopped = reason
        if attempt.rules.answer != "state" or not attempt.calls:
            return Truncated(reason, 0.0)
        return Truncated(reason, await self._referee.judge(attempt.task, "", await self._box(attempt)))

    async def _sample(self, attempt: _Attempt, max_tokens: int) -> Generation:
        context = np.array(attempt.context, dtype=np.int32)
        sampling = Sampling(max_tokens, stop=attempt.dialogue.stops(first=not attempt.turns))
        with tracing.part("generate", {"gen_ai.usage.input_tokens": len(context)}) as span:
            generation = await _within(
                self._limits.turn_seconds, "generate", self._generator.generate(context, sampling)
            )
            span.set_attribute("gen_ai.usage.output_tokens", len(generation.ids))
        nothing = np.array([], dtype=np.int32)
        attempt.turns.append(Turn(generation.ids, generation.logprobs, generation.spans, nothing))
        attempt.context.frombytes(generation.ids.tobytes())
        return generation

    async def _box(self, attempt: _Attempt) -> Box:
        """The episode's sandbox, leased and prepared when it is first needed."""
        if attempt.box is None:
            with tracing.part("acquire"):
                attempt.box = await attempt.lease.enter_async_context(self._sandboxes.acquire())
            await self._referee.prepare(attempt.task, attempt.box)
        return attempt.box

    async def _call(self, attempt: _Attempt, code: str) -> None:
        """Runs `code` in the sandbox and puts what the model is shown of it behind its turn."""
        began = self._clock()
        shown = await self._run_code(await self._box(attempt), [*attempt.rules.program, code])
        attempt.tool_seconds += self._clock() - began
        attempt.calls += 1
        turn = attempt.turns[-1]
        ids = attempt.dialogue.observation(turn.sampled_ids, shown)
        attempt.turns[-1] = replace(turn, observation_ids=ids)
        attempt.context.frombytes(ids.tobytes())

    async def _run_code(self, box: Box, argv: list[str]) -> str:
        limits = self._limits
        run = box.exec(argv, timeout=limits.code_seconds, output_limit=OUTPUT_LIMIT_BYTES)
        try:
            with tracing.part("exec"):
                result = await _within(limits.code_seconds + limits.tool_slack_seconds, "exec", run)
        except InvalidRequest as error:  # such as a NUL byte in the code: the model's fault, so it is told
            return f"Error: {error.message}"
        return describe(result, limits.output_chars)


async def _within(seconds: float, stage: str, call: Awaitable[Result]) -> Result:
    """What `call` returns. Raises OutOfTime, which is nobody's verdict: a full machine is slow, too."""
    try:
        async with asyncio.timeout(seconds) as bound:
            return await call
    except TimeoutError:
        if not bound.expired():
            raise
        raise OutOfTime(stage, seconds) from None


def describe(result: ExecResult, limit: int) -> str:
    """What the model is shown of a run: at most `limit` characters of its output or its error's last line."""
    if result.reason == "TIMED_OUT":
        return "Error: the code ran too long"
    if result.reason != "EXITED":
        return f"Error: the code was stopped ({result.reason.lower()})"
    if result.exit_code:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        return f"Error: {_shorten(lines[-1] if lines else f'exit code {result.exit_code}', limit)}"
    output = result.stdout.decode(errors="replace").strip()
    return f"Output: {_shorten(output, limit)}" if output else "Output: nothing was printed"


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} (cut)"


def _line(text: str) -> str:
    return text.partition("\n")[0]
