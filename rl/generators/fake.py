"""A generator without a model: a function of the dialogue and the weight version writes the turns."""

from __future__ import annotations

import asyncio
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from rl.byte_tokenizer import ByteTokenizer
from rl.dialogue import Tokenizer
from rl.generator import Generation, GeneratorDead, GeneratorStats, Sampling, UpdateFailed
from rl.types import TokenIds, VersionSpan

__all__ = ["FAKE_LOGPROB", "ByteTokenizer", "FakeGenerator", "Reply", "sums_reply"]

Reply = Callable[[str, int, random.Random], str]
"""(the dialogue so far, the weight version, a seeded random state) → the model's next turn."""

FAKE_LOGPROB = -0.5


class FakeGenerator:
    """Writes what `reply` says. `gate`, when given, is waited for in the middle of every request.

    Half of a request's tokens are drawn before the gate and half after it, so a weight update that
    comes while requests wait there splits their spans as a real engine's do. `failing_updates` says
    which versions do not load; `die` ends it as a crashed engine ends.

    The random state that `reply` gets is one of its own for each request, made of the seed, the dialogue, the
    version and how often that dialogue has been continued: what is drawn depends on no order.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply: Reply,
        *,
        seed: int = 0,
        gate: Callable[[], asyncio.Event] | None = None,
        failing_updates: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._reply = reply
        self._seed = seed
        self._draws: Counter[int] = Counter()
        self._gate = gate
        self._failing = frozenset(failing_updates)
        self._version = 0
        self._dead = asyncio.Event()
        self._paused_seconds = 0.0
        self._running = self._finished = self._prompt_tokens = self._generated_tokens = self._updates = 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        self._check_alive()
        dialogue = self._tokenizer.decode(context_ids.tolist())
        text = self._reply(dialogue, self._version, self._random(dialogue))
        ids, finish_reason = self._cut(text, sampling)
        started = self._version
        self._running += 1
        self._prompt_tokens += len(context_ids)
        try:
            await self._pass_gate()
        finally:
            self._running -= 1
        self._finished += 1
        self._generated_tokens += len(ids)
        logprobs = np.full(len(ids), FAKE_LOGPROB, np.float32)
        spans = _spans(started, self._version, len(ids))
        return Generation(np.array(ids, np.int32), logprobs, spans, finish_reason)

    def _random(self, dialogue: str) -> random.Random:
        key = zlib.crc32(dialogue.encode())
        self._draws[key] += 1
        return random.Random(f"{self._seed}/{self._version}/{self._draws[key]}/{dialogue}")

    async def update_weights(self, path: Path, version: int) -> None:
        self._check_alive()
        if version <= self._version or version in self._failing:
            raise UpdateFailed(f"weights {version} from {path} did not load")
        stopped = time.monotonic()
        await asyncio.sleep(0)
        self._paused_seconds += time.monotonic() - stopped
        self._version = version
        self._updates += 1

    def die(self) -> None:
        """End every waiting request and every later call with GeneratorDead."""
        self._dead.set()

    def stats(self) -> GeneratorStats:
        return GeneratorStats(
            running=self._running,
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            paused_seconds=self._paused_seconds,
            updates=self._updates,
        )

    def _check_alive(self) -> None:
        if self._dead.is_set():
            raise GeneratorDead("the fake generator was told to die")

    async def _pass_gate(self) -> None:
        if self._gate is None:
            await asyncio.sleep(0)
        else:
            async with asyncio.TaskGroup() as waiting:
                opened = waiting.create_task(self._gate().wait())
                died = waiting.create_task(self._dead.wait())
                await asyncio.wait((opened, died), return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
                died.cancel()
        self._check_alive()

    def _cut(self, text: str, sampling: Sampling) -> tuple[list[int], str]:
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = self._tokenizer.encode(text[: min(ends)] if ends else text)
        ids += [] if ends else [self._tokenizer.end_of_turn]
        if len(ids) > sampling.max_tokens:
            return ids[: sampling.max_tokens], "length"
        return ids, "stop"


def _spans(first: int, last: int, count: int) -> tuple[VersionSpan, ...]:
    middle = count // 2
    if first == last or middle == 0:
        return (VersionSpan(last, 0, count),)
    return VersionSpan(first, 0, middle), VersionSpan(last, middle, count)


def sums_reply(skill: Callable[[int], float]) -> Reply:
    """A policy that adds: with probability `skill(version)` it calls Python well, else it writes nonsense.

    Train it by publishing versions: `skill` says how good each one is.
    """

    def reply(dialogue: str, version: int, rng: random.Random) -> str:
        said = re.findall(r"Output: (\S+)<", dialogue.rpartition("<|im_start|>user")[2])
        if said:
            return str(said[-1])
        asked = re.findall(r"What is ([0-9+ ]+)\?", dialogue)
        if asked and rng.random() < skill(version):
            return f"print({asked[-1]})\n```"
        return "print(0)\n```"

    return reply
