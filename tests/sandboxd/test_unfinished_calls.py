"""Messages that end because their call did, many calls at a time: neither a file nor a command takes that for
the caller's own end of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from sandboxd import Box, Client
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

from .endings_kit import MARK, Served, marked, until
from .relay_kit import Relay

pytestmark = pytest.mark.anyio
ROUNDS, CALLS = 2, 8
DEADLINE_SECONDS = 0.5
# Says that it runs, and that it was told the end of its input.
SCRIPT = b"echo > began/$0; cat > /dev/null; echo > ends/$0"
PIECE = pb.WriteFileRequest(data=bytes(1 << 14))
# gRPC takes no message of that size.
TOO_LARGE_BYTES = 5 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("e"), '[pools.p]\nbackend = "fake"\nwarm = 1\n')
    yield served
    served.close()


@pytest.fixture
async def box(served: Served) -> AsyncIterator[Box]:
    async with Client(served.address) as client, client.acquire("p", timeout=30) as box:
        await box.exec(["mkdir", "began", "ends"])
        yield box


class Writes:
    """Files of some pieces each; a partial one has a name that begins with a dot."""

    too_large = pb.WriteFileRequest(data=bytes(TOO_LARGE_BYTES))

    def __init__(self, box: Box) -> None:
        self._box = box

    async def begin(self, stub: Any, number: int, timeout: float | None) -> Any:
        call = stub.WriteFile(timeout=timeout)
        target = pb.WriteFileRequest.Target(name=self._box.name, path=b"ends/%d" % number)
        await call.write(pb.WriteFileRequest(target=target))
        for _ in range(number):
            await call.write(PIECE)
        return call

    async def begun(self) -> bool:
        return len(await self._partial()) == CALLS

    async def over(self) -> bool:
        return not await self._partial()

    async def _partial(self) -> list[bytes]:
        return [info.name for info in await self._box.list_files("ends") if info.name.startswith(b".")]


class Commands:
    """Commands that wait for the end of their input."""

    too_large = pb.InteractCommandRequest(stdin=bytes(TOO_LARGE_BYTES))

    def __init__(self, box: Box) -> None:
        self._box = box
        self._marker = uuid.uuid4().hex

    async def begin(self, stub: Any, number: int, timeout: float | None) -> Any:
        call = stub.InteractCommand(timeout=timeout)
        argv = [b"sh", b"-c", SCRIPT, b"%d" % number]
        env = [pb.EnvironmentVariable(name=MARK.encode(), value=self._marker.encode())]
        start = pb.ExecCommandRequest(name=self._box.name, argv=argv, env=env)
        await call.write(pb.InteractCommandRequest(start=start))
        return call

    async def begun(self) -> bool:
        return len(await self._box.list_files("began")) == CALLS

    async def over(self) -> bool:
        return not marked(self._marker)


async def code_of(call: Any) -> grpc.StatusCode:
    if isinstance(call, grpc.aio.StreamStreamCall):
        # Its status is behind what it was told. One that was cancelled here says so by asyncio's error.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for _ in call:
                pass
    code: grpc.StatusCode = await call.code()
    return code


async def broken(relay: Relay, calls: list[Any], too_large: Any) -> None:
    relay.cut()


async def cancelled(relay: Relay, calls: list[Any], too_large: Any) -> None:
    for call in calls:
        call.cancel()


async def deadline(relay: Relay, calls: list[Any], too_large: Any) -> None:
    """Passes by itself."""


async def refused(relay: Relay, calls: list[Any], too_large: Any) -> None:
    for call in calls:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError):
            await call.write(too_large)


ENDINGS: tuple[Callable[[Relay, list[Any], Any], Awaitable[None]], ...] = (
    broken,
    cancelled,
    deadline,
    refused,
)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", [Writes, Commands])
async def test_the_end_of_a_call_is_not_the_end_of_its_messages(
    served: Served, box: Box, tmp_path: Path, kind: type[Writes | Commands], ending: Any
) -> None:
    timeout = DEADLINE_SECONDS if ending is deadline else None
    for _ in range(ROUNDS):
        trial = kind(box)
        async with asyncio.timeout(20), Relay(tmp_path / "r", served.address) as relay:
            async with grpc.aio.insecure_channel(relay.address) as channel:
                stub = pb_grpc.SandboxServiceStub(channel)
                calls = [await trial.begin(stub, number, timeout) for number in range(CALLS)]
                if ending is not deadline:
                    await until(trial.begun)
                await ending(relay, calls, trial.too_large)
                for call in calls:
                    assert await code_of(call) is not grpc.StatusCode.OK
        await until(trial.over)
        assert await box.list_files("ends") == []
        await box.exec(["sh", "-c", "rm -f began/*"])


async def test_a_caller_that_ends_its_messages_is_heard(served: Served, box: Box) -> None:
    async with asyncio.timeout(20), grpc.aio.insecure_channel(served.address) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        for kind in (Writes, Commands):
            call = await kind(box).begin(stub, 1, None)
            await call.done_writing()
            if kind is Commands:
                assert [reply.WhichOneof("event") async for reply in call] == ["started", "stdout", "exited"]
            assert await call.code() is grpc.StatusCode.OK
            assert [info.name for info in await box.list_files("ends")] == [b"1"]
            await box.remove_file("ends/1")
