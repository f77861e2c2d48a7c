"""The calls of one vLLM server: each has a time limit, and those that may be repeated are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import tenacity

from rl.errors import ConfigError
from rl.generator import UpdateFailed

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


class Refused(Exception):
    """The server answered with an error, or not at all; `status` is HTTP's, or DROPPED, or LATE."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Calls:
    """Makes them. `sleep` waits between attempts, in seconds."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: ServerSettings,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._settings = settings
        self._sleep = sleep

    @property
    def url(self) -> str:
        """The server's."""
        return self._settings.url

    async def before(self, path: str, body: dict[str, Any] | None = None) -> None:
        """A call after whose failure the server goes on with what it has. Raises UpdateFailed."""
        try:
            await self.persist("POST", path, body)
        except Refused as error:
            raise UpdateFailed(f"{self.url} did not take part: {error}") from error

    async def persist(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> dict[str, Any]:
        """A call that may be repeated. Raises Refused."""
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, Refused) and _passes(error)),
            stop=tenacity.stop_after_attempt(self._settings.attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
            sleep=self._sleep,
            reraise=True,
        )
        return await attempts(self.call, method, path, body, seconds)

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> dict[str, Any]:
        """A call that is made once. Raises Refused."""
        text = await self.text(method, path, body, seconds)
        try:
            reply = json.loads(text) if text else {}
        except ValueError as error:
            raise Refused(200, f"{path} answered with no JSON: {text[:200]}") from error
        return reply if isinstance(reply, dict) else {}

    async def text(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> str:
        """The same for an answer of any form."""
        limit = seconds or self._settings.admin_seconds
        url = self._settings.url.rstrip("/") + path
        try:
            async with asyncio.timeout(limit), self._session.request(method, url, json=body) as response:
                text = await response.text()
                status = response.status
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"the server {url!r} is no URL; give one like http://host:8000") from error
        except TimeoutError as error:
            raise Refused(LATE, f"{path} took longer than {limit:g} s") from error
        except aiohttp.ClientError as error:
            raise Refused(DROPPED, f"{path}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise Refused(status, f"{path} answered {status}: {' '.join(text.split())[:200]}")
        return text


def _passes(error: Refused) -> bool:
    """Whether the same call may succeed in a moment."""
    return error.status in BUSY or error.status == DROPPED
