"""One episode: the model writes Python, a leased sandbox runs it, the output goes back, a verifier scores.

Consumes a task and its prompt; waits for the generator and the sandbox; produces an `Episode`. It raises
only for what ends the whole run (the generator is dead, the caller cancels): a task that fails is a
reward, a sandbox that fails is `Unscored`, and the two never mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rl.dialogue import FIRST_STOP_TEXTS, STOP_TEXTS, Dialogue, find_code
from rl.generator import Generation, Generator, Sampling
from rl.types import Episode, Outcome, Scored, StopReason, Task, TokenIds, Truncated, Turn, Unscored
from sandboxd.errors import InvalidRequest, PoolNotFound, SandboxdError


class ExecResult(Protocol):
    """How one command ended. `reason` is EXITED, SIGNALED, TIMED_OUT, OOM_KILLED, …"""

    @property
    def reason(self) -> str: ...

    @property
    def exit_code(self) -> int | None: ...

    @property
    def stdout(self) -> bytes: ...

    @property
    def stderr(self) -> bytes: ...


class Box(Protocol):
    """A leased sandbox."""

    async def exec(self, argv: Sequence[str], *, timeout: float, output_limit: int) -> ExecResult: ...


class Sandboxes(Protocol):
    """Where sandboxes come from; leaving the context releases the lease."""

    def acquire(self) -> AbstractAsyncContextManager[Box]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use.

    `turn_tokens` bounds one sampled turn and `context_tokens` the whole dialogue; `code_seconds` one run of
    code in the sandbox; `output_chars` what of its output the model sees.
    """

    max_turns: int = 3
    turn_tokens: int = 64
    context_tokens: int = 1024
    code_seconds: float = 5.0
    output_chars: int = 160


@dataclass(slots=True)
class _Progress:
    """What has happened so far in one episode."""

    context: list[int]
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0
    tool_seconds: float = 0.0


class Rollout:
    """Plays episodes. It keeps no state between them, so any number may run at once."""

    def __init__(
        self,
        generator: Generator,
        sandboxes: Sandboxes,
        dialogue: Dialogue,
        verify: Callable[[Task, str], float],
        *,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator = generator
        self._sandboxes = sandboxes
        self._dialogue = dialogue
        self._verify = verify
        self._limits = limits
        self._clock = clock

    def prompt(self, task: Task) -> TokenIds:
        """The prompt of a task, shared by all attempts at it."""
        return self._dialogue.prompt(task.question)

    async def run(self, task: Task) -> Episode:
        """Play one episode. Raises GeneratorDead when the engine is gone, PoolNotFound when misconfigured."""
        started = self._clock()
        progress = _Progress(self.prompt(task).tolist())
        try:
            async with AsyncExitStack() as lease:
                stop_reason, outcome = await self._play(task, progress, lease)
        except PoolNotFound:
            raise
        except SandboxdError as error:
            stage = str(error.phase or "exec")
            outcome = Unscored(error.reason, stage, error.message.partition("\n")[0])
            stop_reason = StopReason.INTERRUPTED
        return Episode(
            task=task,
            turns=tuple(progress.turns),
            outcome=outcome,
            stop_reason=stop_reason,
            wall_seconds=self._clock() - started,
            tool_seconds=progress.tool_seconds,
        )

    async def _play(
        self, task: Task, progress: _Progress, lease: AsyncExitStack
    ) -> tuple[StopReason, Outcome]:
        box: Box | None = None
        for turns_left in reversed(range(self._limits.max_turns)):
            room = self._limits.context_tokens - len(progress.context)
            if room < 1:
                return _cut(StopReason.CONTEXT_OVERFLOW)
            generation = await self._sample(progress, min(room, self._limits.turn_tokens))
            text = self._dialogue.text(generation.ids, first=len(progress.turns) == 1)
            code = find_code(text)
            if code is None and generation.finish_reason == "length":
                return _cut(StopReason.MAX_TOKENS)
            if code is None:
                # The task is to use the tool: an answer that no run stands behind is a guess.
                reward = self._verify(task, text) if progress.calls else 0.0
                return StopReason.COMPLETED, Scored(reward)
            if not turns_left:
                return _cut(StopReason.MAX_TURNS)
            began = self._clock()
            if box is None:
                box = await lease.enter_async_context(self._sandboxes.acquire())
            shown = await self._call(box, code)
            progress.tool_seconds += self._clock() - began
            progress.calls += 1
            self._observe(progress, shown)
        raise AssertionError("max_turns is at least 1, so the loop has returned")

    async def _sample(self, progress: _Progress, max_tokens: int) -> Generation:
        context = np.array(progress.context, dtype=np.int32)
        stop = STOP_TEXTS if progress.turns else FIRST_STOP_TEXTS
        generation = await self._generator.generate(context, Sampling(max_tokens, stop=stop))
        nothing = np.array([], dtype=np.int32)
        progress.turns.append(Turn(generation.ids, generation.logprobs, generation.spans, nothing))
        progress.context.extend(generation.ids.tolist())
        return generation

    def _observe(self, progress: _Progress, shown: str) -> None:
        turn = progress.turns[-1]
        ids = self._dialogue.observation(turn.sampled_ids, shown)
        progress.turns[-1] = replace(turn, observation_ids=ids)
        progress.context.extend(ids.tolist())

    async def _call(self, box: Box, code: str) -> str:
        """Run `code` in the sandbox and return what the model is shown of it."""
        try:
            result = await box.exec(
                ["python3", "-I", "-S", "-c", code],
                timeout=self._limits.code_seconds,
                output_limit=16384,
            )
        except InvalidRequest as error:  # such as a NUL byte in the code: the model's fault, so it is told
            return f"Error: {error.message}"
        return describe(result, self._limits.output_chars)


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


def _cut(reason: StopReason) -> tuple[StopReason, Outcome]:
    """A dialogue that ran into a limit holds no finished answer, so there is nothing to reward."""
    return reason, Truncated(reason, 0.0)
