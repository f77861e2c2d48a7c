"""Calls in which nothing is said for long: proxies keep their connection, and who is gone is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sandboxd import Client, keepalive, patience
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
WAITS = [b"sh", b"-c", b"while [ ! -e go ]; do sleep 0.02; done; echo done"]
OFTEN_SECONDS = 0.2
NEVER_SECONDS = 1e6


class Proxy:
    """Stands before a daemon and counts what passes each way; once it is `deaf` nothing does."""

    def __init__(self, path: Path, target: str) -> None:
        self.address = f"unix:{path}"
        self.to_daemon, self.to_client = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.deaf = False
        self._path, self._target = path, target.removeprefix("unix:")
        self._passing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        async with await asyncio.start_unix_server(self._serve, self._path):
            yield self
            for task in self._passing:
                task.cancel()
            await asyncio.wait(self._passing)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(self._target)
        for way in ((reader, ours, self.to_daemon), (theirs, writer, self.to_client)):
            self._passing.add(asyncio.ensure_future(self._pass(*way)))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: asyncio.Semaphore
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if not self.deaf:
                    writer.write(data)
                    passed.release()
        finally:
            writer.transport.abort()

    async def pass_more(self, times: int) -> None:
        """Waits until something has passed so often both ways, from now on."""
        for way in (self.to_daemon, self.to_client):
            while not way.locked():
                await way.acquire()
        for way in (self.to_daemon, self.to_client) * times:
            await way.acquire()


@contextlib.asynccontextmanager
async def silent(proxy: Proxy, name: str, options: keepalive.Options = ()) -> AsyncIterator[Any]:
    """The stream of a command that has begun and prints nothing until there is a file `go`."""
    async with grpc.aio.insecure_channel(proxy.address, options=options) as channel:
        request = pb.ExecCommandRequest(name=name, argv=WAITS)
        stream = pb_grpc.SandboxServiceStub(channel).ExecCommand(request)
        assert (await stream.read()).HasField("started")
        yield stream


async def test_a_silent_call_is_no_silent_connection(daemon: OpenDaemon, tmp_path: Path) -> None:
    """Of a client that knows nothing of it: the daemon's pings are answered by every gRPC."""
    async with daemon(keepalive_seconds=OFTEN_SECONDS) as direct, direct.acquire("python", timeout=20) as box:
        async with Proxy(tmp_path / "proxy", direct.address).running() as proxy, asyncio.timeout(30):
            async with silent(proxy, box.name) as stream:
                await proxy.pass_more(5)
                await box.write_file("go", b"")
                assert (await stream.read()).stdout.data == b"done\n"
                assert (await stream.read()).exited.exit_code == 0


async def test_a_daemon_that_does_not_ping_is_pinged(daemon: OpenDaemon, tmp_path: Path) -> None:
    settings = {"keepalive_seconds": NEVER_SECONDS}
    async with daemon(**settings) as direct, direct.acquire("python", timeout=20) as box:
        async with Proxy(tmp_path / "proxy", direct.address).running() as proxy, asyncio.timeout(50):
            async with silent(proxy, box.name, keepalive.of_client(2 * keepalive.LEAST_SECONDS)) as stream:
                # By default the third of them would have the daemon cut the connection.
                await proxy.pass_more(4)
                await box.write_file("go", b"")
                assert (await stream.read()).stdout.data == b"done\n"


async def test_who_is_gone_without_a_word_is_noticed(daemon: OpenDaemon, tmp_path: Path) -> None:
    """A host that lost its power, or a proxy that forgot the connection: no end of it ever arrives."""
    options = {**dict(keepalive.of_client(OFTEN_SECONDS)), "grpc.http2.ping_timeout_ms": 500}
    async with daemon(keepalive_seconds=NEVER_SECONDS) as direct, direct.acquire("python", timeout=20) as box:
        async with Proxy(tmp_path / "proxy", direct.address).running() as proxy, asyncio.timeout(30):
            async with silent(proxy, box.name, tuple(options.items())) as stream:
                proxy.deaf = True
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stream.read()
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_clients_ping_and_daemons_bear_it() -> None:
    assert set(keepalive.of_client()) <= set(patience.CHANNEL_OPTIONS)
    assert keepalive.LEAST_SECONDS < keepalive.KEEPALIVE_SECONDS
    assert dict(keepalive.of_server(1e7))["grpc.keepalive_time_ms"] == (1 << 31) - 1
    assert Client("unix:/nowhere").patience.seconds > 0
