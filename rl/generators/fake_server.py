"""A vLLM server without vLLM or a model: the calls that `rl.generators.server` makes, with faults on demand.

    python -m rl.generators.fake_server PORT       a process of its own, to be killed; it adds numbers up

It keeps vLLM's rules: while paused nothing is drawn, an update begins once and ends once, and the version is
set by its end. What it is asked, but for tokens and health, it remembers in `calls`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from aiohttp import web

from rl.generator import Sampling, UpdateFailed
from rl.generators.fake import ByteTokenizer, FakeGenerator, sums_reply

ERROR, HANG, DROP = "error", "hang", "drop"
"""What may befall a call: status 500; no answer ever; a connection cut once the call has done its work."""


class Receiver(Protocol):
    """A server's end of a process group; each call says whether it went well."""

    async def join(self, init_info: dict[str, Any]) -> bool: ...

    async def receive(self, update_info: dict[str, Any]) -> bool: ...

    async def leave(self) -> bool: ...


class FakeServer:
    """`faults[path]` says what befalls the next calls of that path, one after the other. Without `draws` it
    is a server that was started without `--enable-scale-out`. A `receiver` takes weights from a network."""

    def __init__(self, generator: FakeGenerator, receiver: Receiver | None = None, workers: int = 1) -> None:
        self.generator = generator
        self.receiver = receiver
        self.workers = workers
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.salts: list[str] = []
        self.faults: defaultdict[str, deque[str]] = defaultdict(deque)
        self.weight_version = "default"
        self.draws = True
        self._running = asyncio.Event()
        self._running.set()
        self._active = self._torn = False

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    def app(self) -> web.Application:
        """The calls, as a web application."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/get_world_size", self._world_size)
        for name in (
            *("pause", "resume", "init_weight_transfer_engine"),
            *("shutdown_weight_transfer_engine", "abort_requests", "update_weight_version"),
        ):
            app.router.add_post(f"/{name}", self._admin)
        for name in ("start_weight_update", "update_weights", "finish_weight_update"):
            app.router.add_post(f"/{name}", self._admin)
        return app

    async def _health(self, request: web.Request) -> web.StreamResponse:
        await self._meet_fault(request)
        return web.Response()

    async def _weight_info(self, request: web.Request) -> web.StreamResponse:
        await self._meet_fault(request)
        return web.json_response({"weight_version": self.weight_version})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        await self._meet_fault(request)
        passes = self.generator.stats().finished
        return web.Response(text=f'vllm:iteration_tokens_total_count{{engine="0"}} {passes}.0\n')

    async def _world_size(self, request: web.Request) -> web.StreamResponse:
        await self._meet_fault(request)
        return web.json_response({"world_size": self.workers})

    async def _admin(self, request: web.Request) -> web.StreamResponse:
        name = request.path.removeprefix("/")
        self.calls.append(name)
        body = await request.json() if request.can_read_body else {}
        self.bodies[name] = {**body, **request.query}
        fault = self._next_fault(request)
        if fault == HANG:
            await asyncio.Event().wait()
        if fault == ERROR or not await self._obey(name, body):
            if name == "update_weights":
                self._active, self._torn = False, True
            return web.Response(status=500, text="Internal Server Error")
        if fault == DROP:
            _cut(request)
        return web.json_response({})

    async def _obey(self, name: str, body: dict[str, Any]) -> bool:
        """Whether vLLM would have done it."""
        if name == "pause":
            self._running.clear()
        elif name == "resume":
            self._running.set()
        elif name == "start_weight_update":
            self._active, was = True, self._active
            return not was
        elif name == "update_weights":
            # Layers that a broken update left without memory take no other one.
            return self._active and not self._torn and await self._transfer(name, body)
        elif name == "finish_weight_update":
            self._active, was = False, self._active
            self._torn = self._torn and not was
            version = body.get("weight_version")
            return was and (version is None or await self._serve(int(version)))
        elif name == "update_weight_version":
            self.weight_version = body["new_version"]
        elif name == "shutdown_weight_transfer_engine":
            return not self._active and await self._transfer(name, body)
        elif name == "init_weight_transfer_engine":
            return await self._transfer(name, body)
        return True

    async def _transfer(self, name: str, body: dict[str, Any]) -> bool:
        if self.receiver is None:
            return True
        if name == "update_weights":
            return await self.receiver.receive(body["update_info"])
        if name == "init_weight_transfer_engine":
            return await self.receiver.join(body["init_info"])
        return await self.receiver.leave()

    async def _serve(self, version: int) -> bool:
        """vLLM has no opinion of versions: it takes one that it has again."""
        if version == self.generator.version:
            self.weight_version = str(version)
            return True
        try:
            await self.generator.update_weights(Path("/"), version)
        except UpdateFailed:
            return False
        self.weight_version = str(version)
        return True

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        await self._meet_fault(request)
        body = await request.json()
        if not self.draws or not body:
            return web.Response(status=422 if self.draws else 403, text="refused")
        self.salts.append(body["cache_salt"])
        wanted = body["sampling_params"]
        sampling = Sampling(wanted["max_tokens"], tuple(wanted["stop"]))
        await self._running.wait()
        drawn = await self.generator.generate(np.array(body["token_ids"], np.int32), sampling)
        await self._running.wait()
        ids = drawn.ids.tolist()
        entries = [
            {"token_id": token, "logprob": float(value), "rank": 1}
            for token, value in zip(ids, drawn.logprobs, strict=True)
        ]
        spans = [
            {"version": str(span.version or "default"), "start": span.start, "end": span.end}
            for span in drawn.spans
        ]
        choice = {"index": 0, "token_ids": ids, "finish_reason": drawn.finish_reason}
        choice |= {"logprobs": {"content": entries}, "weight_versions": spans}
        return web.json_response({"choices": [choice]})

    async def _meet_fault(self, request: web.Request) -> None:
        fault = self._next_fault(request)
        if fault == HANG:
            await asyncio.Event().wait()
        if fault == ERROR:
            raise web.HTTPInternalServerError
        if fault == DROP:
            _cut(request)

    def _next_fault(self, request: web.Request) -> str | None:
        queue = self.faults[request.path]
        return queue.popleft() if queue else None


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


@asynccontextmanager
async def serving(server: FakeServer, port: int = 0) -> AsyncIterator[str]:
    """Serves on the loopback for the length of the block; gives the URL."""
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, chosen = runner.addresses[0][:2]
        yield f"http://{host}:{chosen}"
    finally:
        await runner.cleanup()


async def main(port: int) -> None:
    """Serves until it is killed; prints its URL once it does."""
    generator = FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 0.5 + version / 100))
    async with serving(FakeServer(generator), port) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
