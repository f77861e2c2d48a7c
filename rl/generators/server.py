"""A vLLM server as a generator: token ids in and out, and its weights updated in flight, all over HTTP.

The server needs `VLLM_SERVER_DEV_MODE=1` for the calls that have to do with weights, `--enable-scale-out` for
those with token ids, and `--weight-transfer-config '{"backend": "shared_memory"}'`, which works on the
trainer's own host. Every call has a time limit. The server is paused before its weights change and resumed
after it, whatever happened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

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
from rl.generators.calls import DROPPED, LATE, Calls, Refused, ServerSettings
from rl.generators.channels import Channel, Delivery, SegmentChannel
from rl.generators.checks import check_weights, segment_identity
from rl.types import TokenIds, VersionSpan

BASE = "default"
"""What vLLM calls the weights that it was started with."""


class ServerGenerator:
    """Draws from a server. Build it with `open_server`. `calls` names it among others."""

    def __init__(
        self,
        calls: Calls,
        settings: ServerSettings,
        channel: Channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = calls
        self._settings = settings
        self._channel = channel
        self._clock = clock
        self._version = -1
        self._updating = asyncio.Lock()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running = self._finished = self._prompt_tokens = self._generated_tokens = self._updates = 0
        self._paused_seconds = 0.0
        self._resuming: asyncio.Future[None] | None = None

    @property
    def version(self) -> int:
        """What the server serves; -1 when that is nothing that this run has given it."""
        return self._version

    async def connect(self) -> None:
        """Asks what it serves. Raises GeneratorDead when it is not there, ConfigError when it cannot do."""
        try:
            info = await self.calls.persist("GET", "/weight_info")
        except Refused as error:
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
            await self.calls.persist("POST", "/inference/v1/generate", {})
        except Refused as error:
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
            try:
                self._check_alive()
                await self._check_weights(path, version)
            except (UpdateFailed, GeneratorDead):
                self._channel.forget(self.calls)
                raise
            try:
                async with self._channel.delivery(self.calls, path, version) as delivery:
                    await self._take(delivery, version)
            except GeneratorDead as death:
                self._die(str(death))
                raise
            self._updates += 1

    async def _check_weights(self, path: Path, version: int) -> None:
        await asyncio.to_thread(check_weights, path, self._settings.model, version)
        if await asyncio.to_thread(segment_identity, path) is None:
            raise UpdateFailed(f"{self._settings.url} takes weights out of shared memory, not from {path}")

    async def _take(self, delivery: Delivery, version: int) -> None:
        """Raises UpdateFailed, GeneratorDead."""
        changing = False
        try:
            await self.calls.before("/pause?mode=keep&clear_cache=false")
            stopped = self._clock()
            info = await delivery.begin()
            changing = True
            await self._change(version, info)
            changing = False
            # Before it goes on: whoever gives the update up now has given it new weights all the same.
            self._version = version
            self._paused_seconds += self._clock() - stopped
        finally:
            if changing:
                self._die(f"{self._settings.url} was broken off at weights {version}")
            # Shielded: a pause that outlives its update stops every request for ever.
            self._resuming = asyncio.ensure_future(self._resume(torn=changing))
            await asyncio.shield(self._resuming)

    async def settled(self) -> None:
        """Waits until the server goes on after an update that was given up, for MEND_SECONDS at most: whoever
        gave it up does not wait for that, and without its connections it would not happen.
        """
        resuming = self._resuming
        if resuming is None or resuming.done():
            return
        await asyncio.wait((resuming,), timeout=MEND_SECONDS)
        resuming.cancel()
        await asyncio.wait((resuming,))
        if not resuming.cancelled():
            resuming.exception()  # heard of: it is dead to its users already

    async def pulse(self) -> int:
        """How often its engine computed a pass, and tokens, by its own count; -1 when it does not say."""
        try:
            text = await self.calls.text("GET", "/metrics")
        except Refused:
            return -1
        counts = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(PULSE)]
        try:
            return int(sum(map(float, counts))) if counts else -1
        except (ValueError, OverflowError):  # no number, or none that counts
            return -1

    def stats(self) -> GeneratorStats:
        """What this client has asked for; `cached_tokens` and `busy_seconds` are the server's own affair."""
        return GeneratorStats(
            running=self._running,
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            paused_seconds=self._paused_seconds,
            updates=self._updates,
        )

    async def _change(self, version: int, info: dict[str, Any]) -> None:
        """From here on the weights are the new ones or unknown. Raises GeneratorDead."""
        try:
            await self._start()
            await self.calls.call("POST", "/update_weights", {"update_info": info})
            await self.calls.call("POST", "/finish_weight_update", {"weight_version": str(version)})
        except Refused as error:
            self._die(f"{self._settings.url} failed at weights {version}: {error}")
            raise GeneratorDead(self._death.result()) from error

    async def _start(self) -> None:
        """A server whose last update broke off takes the next one only after that has been finished."""
        try:
            await self.calls.call("POST", "/start_weight_update")
        except Refused as error:
            if error.status in (DROPPED, LATE):
                raise
            await self.calls.call("POST", "/finish_weight_update")
            await self.calls.call("POST", "/start_weight_update")

    async def _resume(self, *, torn: bool) -> None:
        """Raises GeneratorDead."""
        if torn:
            await self._mend()
        try:
            await self.calls.persist("POST", "/resume")
        except Refused as error:
            self._die(f"{self._settings.url} stays paused: {error}")
            raise GeneratorDead(self._death.result()) from error

    async def _mend(self) -> None:
        """After an update that broke off. Nobody waits for its requests any longer, and they must not go on:
        vLLM's layers are without memory until an update is finished, if an empty one. And nobody may take
        what it holds for the weights that it was started with. It is dead to its users in any case.
        """
        for path, body in (
            ("/abort_requests", {}),
            ("/start_weight_update", None),
            ("/finish_weight_update", None),
            ("/update_weight_version", {"new_version": UNKNOWN}),
        ):
            with suppress(Refused):
                await self.calls.persist("POST", path, body, MEND_SECONDS)

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
            reply = await self.calls.persist(
                "POST", "/inference/v1/generate", body, self._settings.draw_seconds
            )
            return to_generation(reply)
        except Refused as error:
            if not await self._is_healthy():
                self._die(f"{self._settings.url} is gone: {error}")
                raise GeneratorDead(self._death.result()) from error
            raise GeneratorUnavailable(str(error)) from error

    async def _is_healthy(self) -> bool:
        try:
            await self.calls.call("GET", "/health")
        except Refused:
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


UNKNOWN = "unknown"

MEND_SECONDS = 5.0
"""Each call, and once more: vLLM closes the connection after an error, which the next call runs into."""

PULSE = ("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
"""What vLLM counts after each pass of its engine."""


def to_generation(reply: dict[str, Any]) -> Generation:
    """A reply of `/inference/v1/generate`. Raises Refused when it is none."""
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
        raise Refused(200, f"/inference/v1/generate answered with no generation: {error!r}") from error


@asynccontextmanager
async def open_server(
    settings: ServerSettings,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    channel: Channel | None = None,
) -> AsyncIterator[ServerGenerator]:
    """A server for the length of the block, with weights by `channel`, or else out of memory that it
    shares with the trainer. Raises GeneratorDead when it is not there, ConfigError."""
    headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        calls = Calls(session, settings, sleep)
        channel = channel or SegmentChannel()
        generator = ServerGenerator(calls, settings, channel)
        try:
            await generator.connect()
            yield generator
        finally:
            try:
                await generator.settled()
            finally:
                channel.forget(calls)
