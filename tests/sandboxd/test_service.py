"""A real daemon on a real socket over the fake backend, used through the client and raw stubs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sandboxd import Box, Client, Cut, ExitReason, errors
from sandboxd.status import translated
from sandboxd.types import Exited, Started, Stdout
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]


async def test_the_readme_example(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        result = await box.exec(["python3", "-c", "print(1)"])
        assert (result.stdout, result.exit_code, result.reason) == (b"1\n", 0, ExitReason.EXITED)
        assert result.ok


async def test_output_arrives_as_events_with_offsets(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        events = [event async for event in box.stream(["sh", "-c", "printf ab; printf cd"])]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Exited)
    pieces = [event for event in events if isinstance(event, Stdout)]
    position = 0
    for piece in pieces:
        assert piece.offset == position
        position += len(piece.data)
    assert b"".join(piece.data for piece in pieces) == b"abcd"


async def test_a_command_that_fails_is_data(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        failed = await box.exec(["sh", "-c", "echo no >&2; exit 3"])
        assert (failed.exit_code, failed.stderr, failed.ok) == (3, b"no\n", False)
        late = await box.exec(["sleep", "100"], timeout=0.2)
        assert late.reason is ExitReason.TIMED_OUT
        missing = await box.exec(["no-such-program"])
        assert (missing.reason, missing.exit_code) == (ExitReason.NOT_STARTED, 127)
        assert "no-such-program" in missing.detail
        much = await box.exec(["sh", "-c", "yes"], output_limit=1000)
        assert (much.reason, len(much.stdout)) == (ExitReason.OUTPUT_LIMIT_EXCEEDED, 1000)
        assert much.stdout_cut is None
        cut = await box.exec(["sh", "-c", "yes | head -n 5000; echo end"], output_limit=100, output_tail=10)
        assert (cut.stdout, cut.exit_code) == (b"y\n" * 50 + b"y\ny\ny\nend\n", 0)
        assert (cut.stdout_cut, cut.stderr_cut) == (Cut(at=100, dropped=10004 - 110), None)
        with pytest.raises(errors.InvalidRequest, match="output_tail_bytes"):
            await box.exec(["true"], output_limit=1, output_tail=2 << 20)
        with pytest.raises(errors.InvalidRequest, match="output_limit_bytes"):
            await box.exec(["true"], output_tail=10)


async def test_a_bounded_command_is_one_message(daemon: OpenDaemon) -> None:
    """The same result as of the stream, and the same end when the caller leaves or the sandbox is gone."""
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        argv = ["sh", "-c", "printf ab; printf c >&2; exit 3"]
        run, streamed = await box.exec(argv, output_limit=100), await box.exec(argv)
        assert (run.stdout, run.stderr, run.exit_code) == (b"ab", b"c", 3)
        assert (run.reason, run.stdout, run.stderr) == (streamed.reason, streamed.stdout, streamed.stderr)
        most = await box.exec(
            ["sh", "-c", "yes | head -c 9000000"], output_limit=1 << 20, output_tail=1 << 20
        )
        assert len(most.stdout) == 2 << 20
        assert most.stdout_cut == Cut(at=1 << 20, dropped=9_000_000 - (2 << 20))
        one_by_one = "import os\nfor _ in range(3000): os.write(1, b'x')"
        reply = await raw_run(client, box, limit=5000, argv=[b"python3", b"-c", one_by_one.encode()])
        assert [event.WhichOneof("event") for event in reply.events] == ["started", "stdout", "exited"]
        assert reply.events[1].stdout.data == b"x" * 3000
        with pytest.raises(errors.InvalidRequest, match="from 1 to 1048576"):
            await raw_run(client, box, limit=0)
        with pytest.raises(errors.InvalidRequest, match="from 1 to 1048576"):
            await raw_run(client, box, limit=(1 << 20) + 1)
        marker = ["sh", "-c", "echo $$ >pid; exec sleep 1000"]
        running = asyncio.create_task(box.exec(marker, output_limit=100))
        pid = b""
        async with asyncio.timeout(20):
            while not pid:
                with contextlib.suppress(errors.FileNotFound):
                    pid = (await box.read_file("pid")).strip()
        running.cancel()
        async with asyncio.timeout(20):
            while (await box.exec(["kill", "-0", pid], output_limit=100)).ok:
                await asyncio.sleep(0.01)
        await box.release()
        with pytest.raises(errors.SandboxNotFound):
            await box.exec(["true"], output_limit=100)


async def raw_run(
    client: Client, box: Box, limit: int, argv: Sequence[bytes] = (b"true",)
) -> pb.RunCommandResponse:
    request = pb.ExecCommandRequest(name=box.name, argv=argv, output_limit_bytes=limit)
    with translated():
        response: pb.RunCommandResponse = await client.sandboxes.RunCommand(request)
        return response


async def test_leaving_a_stream_kills_the_command(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        stream = box.stream(["sh", "-c", "echo $$; exec sleep 1000"])
        async for event in stream:
            if isinstance(event, Stdout):
                pid = int(event.data)
                break
        await stream.aclose()
        # The kill follows the cancellation; the next command waits until the process is gone.
        gone = await box.exec(
            ["sh", "-c", f"while kill -0 {pid} 2>/dev/null; do sleep 0.01; done"], timeout=10
        )
        assert gone.ok


async def test_a_sandbox_that_dies_is_lost_and_masked(daemon: OpenDaemon) -> None:
    async with (
        daemon(pools={"p": {"backend": "fake", "warm": 1}}, faults=["die 1"]) as client,
        client.acquire("p", timeout=10) as box,
    ):
        for _ in range(2):
            with pytest.raises(errors.SandboxLost) as raised:
                await box.exec(["true"])
            assert raised.value.mask


async def test_calls_on_a_released_sandbox_say_so(daemon: OpenDaemon) -> None:
    async with daemon() as client:
        box = await client.acquire("python", timeout=10)
        await box.release()
        await box.release()
        with pytest.raises(errors.SandboxNotFound, match="was released"):
            await box.exec(["true"])


async def test_leases_are_renewed_while_the_client_lives(daemon: OpenDaemon) -> None:
    async with daemon() as client:
        box = await client.acquire("python", ttl=3.0, timeout=10)
        expiries: set[float | None] = set()
        async with asyncio.timeout(20):
            while len(expiries) < 2:
                expiries |= {info.expires async for info in client.list_sandboxes() if info.state == "ACTIVE"}
                await asyncio.sleep(0.02)
        assert (await box.exec(["true"])).ok
        await box.release()


async def test_an_unrenewed_lease_ends(daemon: OpenDaemon) -> None:
    async with daemon() as client:
        stub = pb_grpc.SandboxServiceStub(grpc.aio.insecure_channel(client.address))
        request = pb.AcquireSandboxRequest(pool="pools/python")
        request.ttl.FromMilliseconds(100)
        sandbox = await stub.AcquireSandbox(request, timeout=10)
        call = stub.ExecCommand(pb.ExecCommandRequest(name=sandbox.name, argv=[b"sleep", b"100"]))
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetSandbox(pb.GetSandboxRequest(name=sandbox.name))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert "ran out" in (raised.value.details() or "")


async def test_pools_are_listed_and_resized(daemon: OpenDaemon) -> None:
    pools = {"a": {"backend": "fake", "warm": 1}, "b": {"backend": "fake", "warm": 0}}
    async with daemon(pools=pools) as client:
        assert list(await client.list_pools()) == ["a", "b"]
        stats = await client.update_pool("b", warm=3)
        assert (stats.warm_target, stats.size_limit) == (3, 1024)
        with pytest.raises(errors.InvalidRequest, match="must be from 0 to size_limit"):
            await client.update_pool("b", warm=5000)
        with pytest.raises(errors.PoolNotFound, match="this daemon has: a, b"):
            await client.get_pool("c")


async def test_listing_pages_through_all(daemon: OpenDaemon) -> None:
    async with daemon(pools={"p": {"backend": "fake", "warm": 0}}) as client:
        boxes = [await client.acquire("p", timeout=10, labels={"n": str(n)}) for n in range(5)]
        stub = pb_grpc.SandboxServiceStub(grpc.aio.insecure_channel(client.address))
        seen, token = [], ""
        while True:
            page = await stub.ListSandboxes(pb.ListSandboxesRequest(page_size=2, page_token=token))
            seen += [sandbox.labels["n"] for sandbox in page.sandboxes]
            token = page.next_page_token
            if not token:
                break
        assert seen == ["0", "1", "2", "3", "4"]
        listed = [info.name async for info in client.list_sandboxes("p")]
        assert [f"sandboxes/{name}" for name in listed] == [box.name for box in boxes]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.ExecCommandRequest(name="sandboxes/p-1", argv=[]), "argv is empty"),
        (pb.ExecCommandRequest(name="p-1", argv=[b"x"]), "must look like sandboxes/NAME"),
        (pb.ExecCommandRequest(name="sandboxes/p-1", argv=[b"a\0b"]), "zero byte"),
    ],
)
async def test_bad_requests_are_refused_in_words(
    daemon: OpenDaemon, request_: pb.ExecCommandRequest, message: str
) -> None:
    async with daemon(pools={"p": {"backend": "fake"}}) as client:
        box = await client.acquire("p", timeout=10)
        if request_.name == "sandboxes/p-1":
            request_.name = box.name
        stub = pb_grpc.SandboxServiceStub(grpc.aio.insecure_channel(client.address))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.ExecCommand(request_):
                pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (raised.value.details() or "")


async def test_health_and_reflection_answer(daemon: OpenDaemon) -> None:
    async with daemon() as client:
        channel = grpc.aio.insecure_channel(client.address)
        check = health_pb2.HealthCheckRequest(service="sandboxd.v1.SandboxService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(check)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        async for reply in stub.ServerReflectionInfo(requests):
            names = {service.name for service in reply.list_services_response.service}
        assert {"sandboxd.v1.SandboxService", "sandboxd.v1.PoolService"} <= names
        await channel.close()


async def test_two_hundred_streams_of_one_client_do_not_stall(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", timeout=10) as box:
        gate = "while [ ! -e go ]; do sleep 0.05; done"
        waiting = [asyncio.create_task(box.exec(["sh", "-c", gate], timeout=60)) for _ in range(120)]
        await box.write_file("go", b"")
        assert all(result.ok for result in await asyncio.gather(*waiting))


async def test_a_clients_own_error_comes_out_as_itself(daemon: OpenDaemon) -> None:
    async with daemon() as client:
        with pytest.raises(KeyError, match="mine"):
            async with Client(client.address) as other, other.acquire("python", timeout=10):
                raise KeyError("mine")


async def test_callers_that_leave_at_any_moment_leave_no_lease(daemon: OpenDaemon) -> None:
    pools = {"p": {"backend": "fake", "warm": 20, "start_limit": 50}}
    async with daemon(pools=pools, fake={"start_seconds": 0.002}) as client:
        for n in range(300):
            acquiring = asyncio.ensure_future(lease_of(client))
            await asyncio.wait({acquiring}, timeout=n * 0.00002)
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await acquiring).release()
        async with asyncio.timeout(20):
            while (await client.get_pool("p")).active:
                await asyncio.sleep(0.02)
        stats = await client.get_pool("p")
        assert stats.acquired_total == stats.released_total > 0
        assert stats.expired_total == 0


async def lease_of(client: Client) -> Box:
    return await client.acquire("p", ttl=3600, timeout=30)
