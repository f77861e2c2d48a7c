"""The page's HTTP server, inside the daemon: three files, a stream of events, one sandbox from near, and,
for whoever has the token, two actions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from sandboxd.changes import paced
from sandboxd.config import Config, ConfigError
from sandboxd.errors import InvalidRequest, NotFound, SandboxdError
from sandboxd.lifetime import Tasks
from sandboxd.pools import Pools
from sandboxd.runs import followed
from sandboxd.types import POOL_PREFIX, SANDBOX_PREFIX
from sandboxd.web.board import Board, Reader
from sandboxd.web.closeup import closeup
from sandboxd.web.guard import HEADERS, Guard, refused
from sandboxd.web.transcripts import Transcripts

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
# Whoever reads nothing for so long is cut off; its browser asks again.
STUCK_SECONDS = 30.0
PAGES_LIMIT = 32
BODY_BYTES = 4096
WARM_LIMIT = 1_000_000
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("charts", "closeup", "page", "runs")},
}


class Site:
    """The handlers of one daemon's page."""

    def __init__(self, board: Board, transcripts: Transcripts) -> None:
        self._transcripts = transcripts
        self._board = board
        self._pools = board.pools
        self._open = 0
        folder = Path(__file__).parent
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    def routes(self) -> list[web.RouteDef]:
        """All that can be asked for."""
        return [
            *(web.get(path, self.file) for path in FILES),
            web.get("/events", self.events),
            web.get("/sandboxes/{sandbox}", self.sandbox),
            web.post("/sandboxes/{sandbox}/release", self.release),
            web.post("/pools/{pool}/warm", self.warm),
        ]

    async def file(self, request: web.Request) -> web.Response:
        """A part of the page."""
        body, kind = self._files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: see `Reader.news`. At most four a second and at least one."""
        if self._open >= PAGES_LIMIT:
            return refused(503, f"{PAGES_LIMIT} pages are open already: close one")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._open += 1
        try:
            await response.prepare(request)
            await self._tell(response)
        except ConnectionError:
            logger.debug("a page has gone")
        except TimeoutError:
            logger.debug("a page reads nothing: it is cut off")
            # Without this the response's end would wait for the reader, and keep what it has not read.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._open -= 1
        return response

    async def _tell(self, response: web.StreamResponse) -> None:
        reader, clock = Reader(self._board), self._pools.clock
        await response.write(b"retry: 500\n\n")
        pace = paced(self._pools.changes, clock, INTERVAL_SECONDS, HEARTBEAT_SECONDS)
        async with contextlib.aclosing(pace) as looks:  # type: ignore[type-var]
            async for _ in looks:
                async with clock.timeout(STUCK_SECONDS):
                    # Waits while the page does not read: nothing piles up meanwhile.
                    await response.write(f"data: {reader.news()}\n\n".encode())

    async def sandbox(self, request: web.Request) -> web.Response:
        """See `closeup`."""
        return await _answered(closeup(self._pools, self._transcripts, request.match_info["sandbox"]))

    async def release(self, request: web.Request) -> web.Response:
        """Ends a lease."""

        async def release() -> dict[str, object]:
            pool, sandbox_id = self._pools.holding(f"{SANDBOX_PREFIX}{request.match_info['sandbox']}")
            pool.get(sandbox_id)
            pool.release(sandbox_id)
            logger.info("the lease of sandbox %s was ended from the page", sandbox_id)
            return {"released": sandbox_id}

        return await _answered(release())

    async def warm(self, request: web.Request) -> web.Response:
        """Changes how many a pool keeps ready, until the daemon restarts."""

        async def warm() -> dict[str, object]:
            pool = self._pools.named(f"{POOL_PREFIX}{request.match_info['pool']}")
            try:
                body = await request.json()
            except ValueError as error:
                raise InvalidRequest('the body must be JSON, as in {"warm": 8}') from error
            count = body.get("warm") if isinstance(body, dict) else None
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= WARM_LIMIT:
                raise InvalidRequest(f"warm = {count!r}: must be a whole number from 0 to {WARM_LIMIT}")
            pool.resize(warm_target=count)
            logger.info("pool %s keeps %d warm from now on, by the page", pool.name, count)
            return {"warm": count}

        return await _answered(warm())


async def _answered(answer: object) -> web.Response:
    """What it returns as JSON; a refusal as one line of text."""
    try:
        return web.json_response(await answer)  # type: ignore[misc]
    except NotFound as error:
        return refused(404, error.message)
    except InvalidRequest as error:
        return refused(400, error.message)
    except SandboxdError as error:
        return refused(409, error.message)


@contextlib.asynccontextmanager
async def served(config: Config, pools: Pools) -> AsyncIterator[str]:
    """The page of these pools at `config.web`, for as long as the block runs; yields where, with the port
    that was given. Raises ConfigError.
    """
    if config.web is None:
        raise AssertionError("the settings want no page")
    guard = Guard([*config.web_names, config.web.rpartition(":")[0]], config.web_token())
    board = Board(pools, followed(config.web_runs), actions=guard.actions)
    application = web.Application(middlewares=[guard.middleware], client_max_size=BODY_BYTES)
    transcripts = Transcripts(pools.clock)
    application.add_routes(Site(board, transcripts).routes())
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    pools.changes.forward(board.changed)
    pools.heard = transcripts.heard
    try:
        where = await _listen(runner, config.web)
        async with Tasks() as tasks:
            keeping = tasks.create_task(board.keep(), name="page")
            try:
                yield where
            finally:
                keeping.cancel()
    finally:
        pools.changes.drop(board.changed)
        await runner.cleanup()


async def _listen(runner: web.AppRunner, address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        site = web.TCPSite(runner, host.strip("[]"), int(port))
        await site.start()
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"web = {address!r}: {why}; name another with --web") from error
    where = address if int(port) else f"{host}:{site.port}"
    logger.info("the page is at http://%s/", where)
    return where
