"""Any server with OpenAI's chat completions as a generator, for evaluation alone: it deals in text.

The dialogue still goes through `Rollout` as ids, those of a `ByteTokenizer`, which turns into text and back
without loss. There are no log-probabilities (NaN), so nothing drawn here can be trained on.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tenacity

from rl.byte_tokenizer import ByteTokenizer
from rl.errors import ConfigError
from rl.generator import (
    ContextTooLong,
    Generation,
    GeneratorStats,
    GeneratorUnavailable,
    Sampling,
    UpdateFailed,
)
from rl.types import TokenIds, VersionSpan

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
TOO_LONG = re.compile(
    r"context.{0,40}(length|window|long)|(too long|maximum).{0,40}(context|tokens)", re.DOTALL
)
MAX_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """`url` is the base, such as `http://host:8000/v1`; `seconds` bounds one request, of which each draw
    makes at most `attempts`."""

    url: str
    model: str
    key: str | None = None
    seconds: float = 300.0
    attempts: int = 6
    max_connections: int = 64


class _Again(Exception):
    """The request may succeed later; `after` is how many seconds the server asks to wait, if it does."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class EndpointGenerator:
    """Draws from a remote model. `sleep` waits between attempts, in seconds."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: EndpointSettings,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._settings = settings
        self._sleep = sleep
        self._tokenizer = ByteTokenizer()
        self._limit_name = "max_tokens"
        self._running = self._finished = self._prompt_tokens = self._generated_tokens = 0

    @property
    def version(self) -> int:
        return 0

    async def check(self) -> None:
        """Asks for one token. Raises ConfigError when the server is not there or refuses, at once."""
        try:
            await self._post([{"role": "user", "content": "Hi"}], Sampling(1))
        except _Again as error:
            raise ConfigError(f"the endpoint does not answer: {error}") from error

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        messages = to_messages(self._tokenizer.decode(context_ids.tolist()))
        self._running += 1
        try:
            reply = await self._persist(messages, sampling)
        finally:
            self._running -= 1
        self._finished += 1
        usage = reply.get("usage") or {}
        self._prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self._generated_tokens += int(usage.get("completion_tokens") or 0)
        choice = reply["choices"][0]
        return self._to_generation(choice["message"].get("content") or "", choice, sampling)

    async def update_weights(self, path: Path, version: int) -> None:
        raise UpdateFailed(
            f"{self._settings.url} serves a model of its own and takes no weights {version} from {path}"
        )

    def stats(self) -> GeneratorStats:
        """Tokens are those that the server reports."""
        return GeneratorStats(
            running=self._running,
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def _to_generation(self, text: str, choice: dict[str, Any], sampling: Sampling) -> Generation:
        # The stop texts are applied here: servers leave them out of what they return, and do not say
        # whether it was one of them that ended the turn.
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = self._tokenizer.encode(text[: min(ends)] if ends else text)
        cut = not ends and choice.get("finish_reason") == "length"
        ids += [] if ends or cut else [self._tokenizer.end_of_turn]
        count = len(ids)
        spans = (VersionSpan(0, 0, count),) if count else ()
        logprobs = np.full(count, np.nan, np.float32)
        return Generation(np.array(ids, np.int32), logprobs, spans, "length" if cut else "stop")

    async def _persist(self, messages: list[dict[str, str]], sampling: Sampling) -> dict[str, Any]:
        settings = self._settings
        backoff = tenacity.wait_random_exponential(multiplier=0.5, max=MAX_WAIT_SECONDS)

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.after if isinstance(error, _Again) else None
            return backoff(state) if asked is None else min(asked, MAX_WAIT_SECONDS)

        try:
            async for attempt in tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception_type(_Again),
                stop=tenacity.stop_after_attempt(settings.attempts),
                wait=wait,
                sleep=self._sleep,
                reraise=True,
            ):
                with attempt:
                    return await self._post(messages, sampling)
        except _Again as error:
            raise GeneratorUnavailable(f"{error}, {settings.attempts} times") from error
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, messages: list[dict[str, str]], sampling: Sampling) -> dict[str, Any]:
        url = f"{self._settings.url.rstrip('/')}/chat/completions"
        body = {
            "model": self._settings.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._limit_name: sampling.max_tokens,
        }
        try:
            async with self._session.post(url, json=body) as response:
                text = await response.text()
                status, after = response.status, response.headers.get("Retry-After", "")
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"the endpoint {url!r} is no URL; give one like http://host:8000/v1") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Again(f"{url}: {type(error).__name__}: {error}") from error
        if status == 400 and "max_completion_tokens" in text and self._limit_name == "max_tokens":
            self._limit_name = (
                "max_completion_tokens"  # what newer models call it, and they take nothing else
            )
            return await self._post(messages, sampling)
        return _read(url, status, text, float(after) if after.replace(".", "", 1).isdigit() else None)


def _read(url: str, status: int, text: str, after: float | None) -> dict[str, Any]:
    """The reply. Raises _Again, ContextTooLong, ConfigError."""
    told = " ".join(text.split())[:200]
    if status in AGAIN:
        raise _Again(f"{url} answered {status}: {told}", after)
    if status in (400, 413, 422) and TOO_LONG.search(text.lower()):
        raise ContextTooLong(f"{url} answered {status}: {told}")
    if status != 200:
        hint = {
            401: "; set OPENAI_API_KEY",
            403: "; set OPENAI_API_KEY",
            404: "; check --endpoint and --model",
        }
        raise ConfigError(f"{url} answered {status}: {told}{hint.get(status, '')}")
    try:
        reply: dict[str, Any] = json.loads(text)
        reply["choices"][0]["message"].get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Again(f"{url} answered with no chat completion: {told}") from error
    return reply


def to_messages(dialogue: str) -> list[dict[str, str]]:
    """A ChatML dialogue that ends with the model's empty turn, as messages."""
    turns = [{"role": role, "content": content} for role, content in TURN.findall(dialogue)]
    return turns if turns[-1] != {"role": "assistant", "content": ""} else turns[:-1]


@asynccontextmanager
async def open_endpoint(settings: EndpointSettings) -> AsyncIterator[EndpointGenerator]:
    """A generator for the length of the block, checked by one small request. Raises ConfigError."""
    headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=settings.seconds),
        connector=aiohttp.TCPConnector(limit=settings.max_connections),
    ) as session:
        generator = EndpointGenerator(session, settings)
        await generator.check()
        yield generator
