"""A vLLM server as a generator: token ids in and out, and its weights updated in flight, all over HTTP.

The server needs `VLLM_SERVER_DEV_MODE=1` for the calls that have to do with weights, `--enable-scale-out` for
those with token ids, and `--weight-transfer-config '{"backend": "shared_memory"}'`, which works on the
trainer's own host. Every call has a time limit. The server is paused before its weights change and resumed
after it, whatever happened.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tenacity

from rl.errors import ConfigError
from rl.generator import (
    Generation,
    GeneratorDead,
    GeneratorStats,
    GeneratorUnavailable,
    Sampling,
    UpdateFailed,
    check_fits,
)
from rl.generators.checks import check_weights, segment_identity
from rl.types import TokenIds, VersionSpan

BASE = "default"
"""What vLLM calls the weights that it was started with."""

BUSY = {408, 425, 429, 503}

DROPPED, LATE = 0, -1
"""In place of HTTP's status: no connection, or one that broke off; no answer in time."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`url` of the server, such as `http://host:8000`; `model` is the directory that it was started with.

    `max_context` is in tokens. `draw_seconds` bounds one request for tokens, `admin_seconds` each call that
    has to do with weights; calls that may be repeated are made up to `attempts` times.
    """

    url: str
    model: Path
    max_context: int = 1024
    key: str | None = None
    draw_seconds: float = 300.0
    admin_seconds: float = 60.0
    attempts: int = 3


class _Refused(Exception):
    """The server answered with an error, or not at all; `status` is HTTP's, or DROPPED, or LATE."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class ServerGenerator:
    """Draws from a server. Build it with `open_server`. `sleep` waits between attempts, in seconds."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: ServerSettings,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._settings = settings
        self._sleep = sleep
        self._clock = clock
        self._version = -1
        self._segment: tuple[int, int] | None = None
        self._updating = asyncio.Lock()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running = self._finished = self._prompt_tokens = self._generated_tokens = self._updates = 0
        self._paused_seconds = 0.0

    @property
    def version(self) -> int:
        """What the server serves; -1 when that is nothing that this run has given it."""
        return self._version

    async def connect(self) -> None:
        """Asks what it serves. Raises GeneratorDead when it is not there, ConfigError when it cannot do."""
        try:
            info = await self._persist("GET", "/weight_info")
        except _Refused as error:
            if error.status == 404:
                raise ConfigError(
                    f"{self._settings.url} has no calls for weights: start it with VLLM_SERVER_DEV_MODE=1"
                ) from error
            raise GeneratorDead(f"{self._settings.url} is not there: {error}") from error
        await self._check_draws()
        self._version = 0 if info.get("weight_version") == BASE else -1

    async def _check_draws(self) -> None:
        """By a request without anything in it, which a server that draws finds fault with."""
        try:
            await self._persist("POST", "/inference/v1/generate", {})
        except _Refused as error:
            if error.status in (403, 404):
                raise ConfigError(
                    f"{self._settings.url} takes no token ids: start it with --enable-scale-out"
                ) from error

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        check_fits(context_ids, sampling, self._settings.max_context)
        self._check_alive()
        version = self._version
        self._running += 1
        try:
            generation = await self._unless_dead(self._draw(context_ids, sampling, version))
        finally:
            self._running -= 1
        oldest = min((span.version for span in generation.spans), default=version)
        if oldest < version:
            self._die(
                f"{self._settings.url} drew with weights {oldest} after it had {version}: it was restarted"
            )
            raise GeneratorDead(self._death.result())
        self._finished += 1
        self._prompt_tokens += len(context_ids)
        self._generated_tokens += len(generation.ids)
        return generation

    async def update_weights(self, path: Path, version: int) -> None:
        """As any generator's. After a failure in the middle its weights are unknown: it is dead to its users,
        and who connects again sends them whole.
        """
        async with self._updating:
            self._check_alive()
            await asyncio.to_thread(check_weights, path, self._settings.model, version)
            segment = await asyncio.to_thread(segment_identity, path)
            if segment is None:
                raise UpdateFailed(
                    f"{self._settings.url} takes weights out of shared memory, not from {path}"
                )
            if segment != self._segment:
                await self._before("/init_weight_transfer_engine", {"init_info": {"path": str(path)}})
                self._segment = segment
            try:
                await self._before("/pause?mode=keep&clear_cache=false")
                stopped = self._clock()
                await self._change(version)
                self._paused_seconds += self._clock() - stopped
            finally:
                await self._resume()
            self._version = version
            self._updates += 1

    def stats(self) -> GeneratorStats:
        """What this client has asked for; `cached_tokens` and `busy_seconds` are the server's own affair."""
        return GeneratorStats(
            running=self._running,
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            generated_tokens=self._generated_tokens,
            busy_seconds=0.0,
            paused_seconds=self._paused_seconds,
            updates=self._updates,
        )

    async def _change(self, version: int) -> None:
        """From here on the weights are the new ones or unknown. Raises GeneratorDead."""
        try:
            await self._start()
            await self._call("POST", "/update_weights", {"update_info": {"version": version}})
            await self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        except _Refused as error:
            self._die(f"{self._settings.url} failed at weights {version}: {error}")
            raise GeneratorDead(self._death.result()) from error

    async def _start(self) -> None:
        """A server whose last update broke off takes the next one only after that has been finished."""
        try:
            await self._call("POST", "/start_weight_update")
        except _Refused as error:
            if error.status in (DROPPED, LATE):
                raise
            await self._call("POST", "/finish_weight_update")
            await self._call("POST", "/start_weight_update")

    async def _before(self, path: str, body: dict[str, Any] | None = None) -> None:
        """A call after whose failure the server goes on with what it has. Raises UpdateFailed."""
        try:
            await self._persist("POST", path, body)
        except _Refused as error:
            raise UpdateFailed(f"{self._settings.url} did not take part: {error}") from error

    async def _resume(self) -> None:
        """Shielded: a pause that outlives its update stops every request for ever. Raises GeneratorDead."""
        try:
            await asyncio.shield(self._persist("POST", "/resume"))
        except _Refused as error:
            self._die(f"{self._settings.url} stays paused: {error}")
            raise GeneratorDead(self._death.result()) from error

    async def _draw(self, context_ids: TokenIds, sampling: Sampling, version: int) -> Generation:
        body = {
            "token_ids": context_ids.tolist(),
            # The salt keeps keys and values that old weights computed from serving new requests.
            "cache_salt": f"v{version}",
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop": list(sampling.stop),
                "logprobs": 0,
                "skip_special_tokens": False,
            },
        }
        try:
            reply = await self._persist("POST", "/inference/v1/generate", body, self._settings.draw_seconds)
            return to_generation(reply)
        except _Refused as error:
            if not await self._is_healthy():
                self._die(f"{self._settings.url} is gone: {error}")
                raise GeneratorDead(self._death.result()) from error
            raise GeneratorUnavailable(str(error)) from error

    async def _is_healthy(self) -> bool:
        try:
            await self._call("GET", "/health")
        except _Refused:
            return False
        return True

    async def _unless_dead(self, draw: Awaitable[Generation]) -> Generation:
        """What the server draws, unless its weights turn out to be unknown meanwhile."""
        drawing = asyncio.ensure_future(draw)
        try:
            await asyncio.wait((drawing, self._death), return_when=asyncio.FIRST_COMPLETED)
            if drawing.done():
                return await drawing
            raise GeneratorDead(self._death.result())
        finally:
            drawing.cancel()
            await asyncio.wait((drawing,))

    def _check_alive(self) -> None:
        if self._death.done():
            raise GeneratorDead(self._death.result())

    def _die(self, why: str) -> None:
        if not self._death.done():
            self._death.set_result(why)

    async def _persist(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> dict[str, Any]:
        """A call that may be repeated. Raises _Refused."""
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, _Refused) and _passes(error)),
            stop=tenacity.stop_after_attempt(self._settings.attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
            sleep=self._sleep,
            reraise=True,
        )
        return await attempts(self._call, method, path, body, seconds)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> dict[str, Any]:
        limit = seconds or self._settings.admin_seconds
        url = self._settings.url.rstrip("/") + path
        try:
            async with asyncio.timeout(limit), self._session.request(method, url, json=body) as response:
                text = await response.text()
                status = response.status
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"the server {url!r} is no URL; give one like http://host:8000") from error
        except TimeoutError as error:
            raise _Refused(LATE, f"{path} took longer than {limit:g} s") from error
        except aiohttp.ClientError as error:
            raise _Refused(DROPPED, f"{path}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise _Refused(status, f"{path} answered {status}: {' '.join(text.split())[:200]}")
        try:
            reply = json.loads(text) if text else {}
        except ValueError as error:
            raise _Refused(status, f"{path} answered with no JSON: {text[:200]}") from error
        return reply if isinstance(reply, dict) else {}


def _passes(error: _Refused) -> bool:
    """Whether the same call may succeed in a moment."""
    return error.status in BUSY or error.status == DROPPED


def to_generation(reply: dict[str, Any]) -> Generation:
    """A reply of `/inference/v1/generate`. Raises _Refused when it is none."""
    try:
        choice = reply["choices"][0]
        ids = np.array(choice["token_ids"], np.int32)
        entries = choice["logprobs"]["content"]
        # A rank is missing where the log-probability was not a number; vLLM sends some number all the same.
        values = [np.nan if entry.get("rank") is None else entry["logprob"] for entry in entries]
        spans = tuple(
            VersionSpan(0 if span["version"] == BASE else int(span["version"]), span["start"], span["end"])
            for span in choice["weight_versions"] or ()
        )
        reason = "length" if choice["finish_reason"] == "length" else "stop"
        if not len(ids) == len(values) == (spans[-1].end if spans else 0):
            raise ValueError(f"{len(ids)} tokens, {len(values)} log-probabilities, spans {spans}")
        return Generation(ids, np.array(values, np.float32), spans, reason)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _Refused(200, f"/inference/v1/generate answered with no generation: {error!r}") from error


@asynccontextmanager
async def open_server(
    settings: ServerSettings, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[ServerGenerator]:
    """A server for the length of the block. Raises GeneratorDead when it is not there, ConfigError."""
    headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        generator = ServerGenerator(session, settings, sleep)
        await generator.connect()
        yield generator
