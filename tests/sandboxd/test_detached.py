"""Commands that outlive their call, through a real daemon and namespace sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sandboxd import Box, Client, CommandInfo, Cut, DetachedCommand, ExitReason, Kept, errors
from sandboxd.requests import AcquireOptions
from sandboxd.status import translated
from sandboxd.types import Exited, Started, Stdout
from sandboxd.v1 import sandbox_service_pb2 as pb

pytestmark = pytest.mark.anyio
POOLS = {"python": {"backend": "namespace", "warm": 1}}
GATE = "while [ ! -e go ]; do sleep 0.01; done; "


@pytest.fixture
async def box(daemon: Callable[..., Any]) -> AsyncIterator[Box]:
    async with daemon(pools=POOLS) as client, client.acquire("python", timeout=30) as leased:
        yield leased


def request(box: Box, script: str, **fields: Any) -> pb.ExecCommandRequest:
    return pb.ExecCommandRequest(name=box.name, argv=[b"sh", b"-c", script.encode()], **fields)


async def test_a_command_goes_on_when_its_call_is_cancelled(box: Box) -> None:
    script = "echo begun; " + GATE + "echo done; exit 7"
    call = box._stub.ExecCommand(request(box, script, command_id="build", detached=True))
    assert (await call.read()).HasField("started")
    assert (await call.read()).stdout.data == b"begun\n"
    call.cancel()
    assert await box.list_commands() == [CommandInfo("build", True, Kept(0, 6), Kept(0, 0))]
    await box.write_file("go", b"")
    result = await box.command("build").wait()
    assert (result.stdout, result.exit_code, result.reason) == (b"begun\ndone\n", 7, ExitReason.EXITED)
    events = [event async for event in box.attach("build", stdout_offset=6)]
    assert [type(event) for event in events] == [Started, Stdout, Exited]
    assert events[1] == Stdout(b"done\n", 6)


async def test_a_named_command_that_is_not_detached_ends_with_its_call(box: Box) -> None:
    call = box._stub.ExecCommand(request(box, "sleep 1000", command_id="build"))
    assert (await call.read()).HasField("started")
    call.cancel()
    result = await box.command("build").wait()
    assert (result.reason, result.signal) == (ExitReason.SIGNALED, 9)


async def test_started_by_the_client(box: Box) -> None:
    command = await box.start(["sh", "-c", "cat; echo $WORD >&2; exit 4"], stdin=b"in", env={"WORD": "w"})
    assert isinstance(command, DetachedCommand)
    result = await command.wait()
    assert (result.stdout, result.stderr, result.exit_code) == (b"in", b"w\n", 4)
    assert [info.id for info in await box.list_commands()] == [command.id]
    await command.forget()
    assert await box.list_commands() == []
    with pytest.raises(errors.CommandNotFound, match="was forgotten"):
        await command.wait()
    late = await box.start(["sleep", "1000"], timeout=0.2)
    assert (await late.wait()).reason is ExitReason.TIMED_OUT
    missing = await box.start(["no-such-program"])
    assert (await missing.wait()).exit_code == 127


async def test_an_id_is_taken_once(box: Box) -> None:
    command = await box.start(["sleep", "1000"], command_id="one")
    with pytest.raises(errors.CommandExists, match="attach to it") as raised:
        await box.start(["true"], command_id="one")
    assert not raised.value.mask
    await command.signal(15)
    assert (await command.wait()).signal == 15
    with pytest.raises(errors.CommandExists):
        await box.start(["true"], command_id="one")
    await command.forget()
    assert (await (await box.start(["true"], command_id="one")).wait()).ok


async def test_what_no_longer_fits_is_a_cut(box: Box) -> None:
    command = await box.start(["sh", "-c", "seq 1 1000000"])
    await command.wait()
    whole = b"".join(b"%d\n" % n for n in range(1, 1_000_001))
    result = await command.wait()
    assert result.stdout == whole[-(1 << 20) :]
    assert result.stdout_cut == Cut(at=0, dropped=len(whole) - (1 << 20))


async def test_a_caller_that_stalls_holds_up_nobody(box: Box) -> None:
    """Neither the command nor another reader; and what it missed it is told."""
    command = await box.start(["sh", "-c", GATE + "yes 0123456789 | head -n 3000000; echo end"])
    stalled = command.attach()
    assert isinstance(await anext(stalled), Started)
    await box.write_file("go", b"")
    async with asyncio.timeout(30):
        assert (await command.wait()).ok
    assert (await box.list_commands())[0].stdout.end == 33_000_004
    received, position, last = 0, 0, b""
    async for event in stalled:
        if isinstance(event, Stdout):
            assert event.offset >= position
            received += len(event.data)
            position, last = event.offset + len(event.data), event.data
    assert isinstance(event, Exited)
    assert position == 33_000_004
    assert 1 << 20 <= received < position
    assert last.endswith(b"end\n")


async def test_a_run_in_one_message_may_be_named(box: Box) -> None:
    run = request(box, "printf out; exit 2", command_id="run", output_limit_bytes=100)
    reply = await box._stub.RunCommand(run)
    assert [event.WhichOneof("event") for event in reply.events] == ["started", "stdout", "exited"]
    result = await box.command("run").wait()
    assert (result.stdout, result.exit_code) == (b"out", 2)


@pytest.mark.parametrize("command_id", ["Up", "1st", "a" * 64, "under_score", "a/b", "-a", "\u00e9"])
async def test_ids_that_cannot_be(box: Box, command_id: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="command_id"):
        await box.start(["true"], command_id=command_id)
    with pytest.raises(errors.InvalidRequest, match="command_id"):
        await box.command(command_id).wait()


async def test_what_makes_no_sense_is_named(box: Box) -> None:
    async def refused(call: Any, said: str) -> None:
        with pytest.raises(errors.InvalidRequest, match=said), translated():
            await call.read()

    stub = box._stub
    await refused(stub.ExecCommand(request(box, "true", detached=True)), "needs a command_id")
    interact = stub.InteractCommand()
    await interact.write(pb.InteractCommandRequest(start=request(box, "true", command_id="x")))
    await refused(interact, "ExecCommand starts named commands")
    await refused(stub.AttachCommand(pb.AttachCommandRequest(name=box.name)), "command_id ''")
    negative = pb.AttachCommandRequest(name=box.name, command_id="x", stdout_offset=-1)
    await refused(stub.AttachCommand(negative), "must not be negative")
    with pytest.raises(errors.InvalidRequest, match="signal 0"):
        await box.command("x").signal(0)
    for call in (box.command("x").wait(), box.command("x").signal(9), box.command("x").forget()):
        with pytest.raises(errors.CommandNotFound, match="'x'"):
            await call


async def test_a_detached_command_goes_with_its_sandbox(daemon: Callable[..., Any]) -> None:
    async with daemon(pools=POOLS) as client:
        async with client.acquire("python", timeout=30) as box:
            command = await box.start(["sleep", "1000"])
            waiting = asyncio.create_task(command.wait())
            stream = command.attach()
            assert isinstance(await anext(stream), Started)
        with pytest.raises(errors.SandboxdError):
            await waiting
        with contextlib.suppress(errors.SandboxdError):
            await anext(stream)
        with pytest.raises(errors.SandboxNotFound, match="was released"):
            await command.wait()


async def test_a_client_that_starts_again_finds_its_command(daemon: Callable[..., Any]) -> None:
    async with daemon(pools=POOLS) as client:
        again: AcquireOptions = {"request_id": "mine", "timeout": 30}
        async with Client(client.address) as first:
            box = await first.acquire("python", **again)
            await box.start(["sh", "-c", "echo kept"], command_id="work")
        async with Client(client.address) as second, second.acquire("python", **again) as box:
            assert (await box.command("work").wait()).stdout == b"kept\n"
