"""What the loop asks of a generator: tokens in; tokens, log-probabilities and weight versions out.

`rl.generators` holds the implementations: `VllmGenerator` (the real one) and `FakeGenerator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl.types import LogProbs, TokenIds, VersionSpan


class GeneratorDead(RuntimeError):
    """The engine is gone. Every call that waits ends with this one, and no later call succeeds."""


class GeneratorUnavailable(RuntimeError):
    """One request failed for good while others may succeed, as with a remote endpoint."""


class ContextTooLong(ValueError):
    """The dialogue is longer than the generator takes."""


class UpdateFailed(RuntimeError):
    """New weights did not reach the engine; it goes on with the version that it had."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. The defaults draw from the policy itself, and only they may be trained on.

    `top_k` 0 means no limit. A `stop` text is kept at the end of the sampled tokens, because the
    policy chose it.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; at least one token must be allowed")

    def check_trainable(self) -> None:
        """Raise ValueError unless the log-probabilities returned are those of the whole policy.

        A truncated or tempered distribution is renormalised over fewer tokens than the trainer's
        softmax, which biases each importance ratio by the log of the mass left out.
        """
        if (self.temperature, self.top_p, self.top_k) != (1.0, 1.0, 0):
            raise ValueError(
                f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k} "
                "cannot be trained on: use temperature 1, top_p 1, top_k 0"
            )


@dataclass(frozen=True, slots=True)
class Generation:
    """One draw: `ids` and `logprobs` have one entry a sampled token, `spans` cover them.

    `finish_reason` is "stop" (end-of-turn token or a stop text) or "length".
    """

    ids: TokenIds
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class GeneratorStats:
    """Counters since the start, and the requests running now; 0 is what a generator does not count.

    `cached_tokens` are those of `prompt_tokens` that earlier requests had computed already.
    `busy_seconds` is the time during which at least one request ran, `paused_seconds` the time that
    weight updates stopped the engine. `kv_cache_usage` is the share of the cache that requests hold now,
    `queued` how many wait for a place in it, `preemptions` how often one lost its place.
    """

    running: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_seconds: float = 0.0
    paused_seconds: float = 0.0
    updates: int = 0
    kv_cache_usage: float = 0.0
    queued: int = 0
    preemptions: int = 0


def check_fits(context_ids: TokenIds, sampling: Sampling, max_context: int) -> None:
    """Raises ContextTooLong unless the context and all that may be drawn after it fit into so many tokens."""
    if len(context_ids) + sampling.max_tokens > max_context:
        raise ContextTooLong(
            f"{len(context_ids)} context tokens and {sampling.max_tokens} new ones do not fit into"
            f" {max_context}"
        )


class Generator(Protocol):
    """Draws from the current weights, and takes new ones while requests run.

    `version` is the newest weights that are live; requests that began before an update go on with the
    new weights, and their spans say which tokens came from which.
    """

    @property
    def version(self) -> int: ...

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        """Sample a continuation of `context_ids`.

        Raises GeneratorDead, GeneratorUnavailable, ContextTooLong.
        """
        ...

    async def update_weights(self, path: Path, version: int) -> None:
        """Make the weights at `path` live as `version`: those of a safetensors directory, or those that a
        segment (`rl.segment`) holds under that number. UpdateFailed leaves the old ones live."""
        ...

    def stats(self) -> GeneratorStats: ...
