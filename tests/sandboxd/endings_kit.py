"""Calls that are held in one phase, and what ends them there: for the table of phases and endings."""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import grpc

from sandboxd import Box, Client
from sandboxd.bench.audit import Snapshot
from sandboxd.types import PoolStats
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

from .test_recovery import pid_of

MARK = "ENDING"
LEASE_SECONDS = 1
HELD = "sleep 1000"
# What a sandbox has before the calls that attach to a command, and those about files.
ATTACHED, LARGE = "attached", "files/large"
LARGE_BYTES = 8 << 20
WHOLE, HALF = "whole", "half"
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Target:
    """What a call is about. It goes to another process."""

    pool: str
    sandbox: str = ""
    marker: str = ""

    def command(self, script: str, **fields: Any) -> pb.ExecCommandRequest:
        """A command whose processes are found by their environment."""
        env = [pb.EnvironmentVariable(name=MARK.encode(), value=self.marker.encode())]
        argv = [b"sh", b"-c", script.encode()]
        return pb.ExecCommandRequest(name=self.sandbox, argv=argv, env=env, **fields)


def acquire(caller: Caller, target: Target, timeout: float | None) -> Any:
    request = pb.AcquireSandboxRequest(pool=f"pools/{target.pool}")
    request.ttl.FromSeconds(LEASE_SECONDS)
    return caller.stub.AcquireSandbox(request, timeout=timeout)


def gang(caller: Caller, target: Target, timeout: float | None) -> Any:
    request = pb.AcquireSandboxesRequest(pool=f"pools/{target.pool}", count=2)
    request.ttl.FromSeconds(LEASE_SECONDS)
    request.position_interval.FromMilliseconds(100)
    return caller.stub.AcquireSandboxes(request, timeout=timeout)


def fork(caller: Caller, target: Target, timeout: float | None) -> Any:
    return caller.stub.ForkSandbox(pb.ForkSandboxRequest(name=target.sandbox, count=2), timeout=timeout)


def silent(caller: Caller, target: Target, timeout: float | None) -> Any:
    # A tree of two, of which one has left the group.
    return caller.stub.ExecCommand(target.command(f"setsid {HELD} & {HELD}; true"), timeout=timeout)


def printing(caller: Caller, target: Target, timeout: float | None) -> Any:
    return caller.stub.ExecCommand(target.command("exec yes"), timeout=timeout)


def named(caller: Caller, target: Target, timeout: float | None) -> Any:
    return caller.stub.ExecCommand(target.command(HELD, command_id=_new_id()), timeout=timeout)


def detached(caller: Caller, target: Target, timeout: float | None) -> Any:
    return caller.stub.ExecCommand(target.command(HELD, command_id=_new_id(), detached=True), timeout=timeout)


def run(caller: Caller, target: Target, timeout: float | None) -> Any:
    return caller.stub.RunCommand(target.command(HELD, output_limit_bytes=1000), timeout=timeout)


def unstarted(caller: Caller, target: Target, timeout: float | None) -> Any:
    return caller.stub.InteractCommand(_said(caller), timeout=timeout)


def stdin_open(caller: Caller, target: Target, timeout: float | None) -> Any:
    start = pb.InteractCommandRequest(start=target.command("exec cat"))
    return caller.stub.InteractCommand(
        _said(caller, start, pb.InteractCommandRequest(stdin=b"a line\n")), timeout=timeout
    )


def stdin_unread(caller: Caller, target: Target, timeout: float | None) -> Any:
    start = pb.InteractCommandRequest(start=target.command(HELD))
    more = [pb.InteractCommandRequest(stdin=bytes(1 << 18))] * 8
    return caller.stub.InteractCommand(_said(caller, start, *more), timeout=timeout)


def terminal(caller: Caller, target: Target, timeout: float | None) -> Any:
    size = pb.TerminalSize(rows=24, columns=80)
    start = pb.InteractCommandRequest(start=target.command("stty raw; exec cat", terminal=size))
    return caller.stub.InteractCommand(_said(caller, start), timeout=timeout)


def attach(caller: Caller, target: Target, timeout: float | None) -> Any:
    request = pb.AttachCommandRequest(name=target.sandbox, command_id=ATTACHED)
    return caller.stub.AttachCommand(request, timeout=timeout)


def read(caller: Caller, target: Target, timeout: float | None) -> Any:
    return caller.stub.ReadFile(pb.ReadFileRequest(name=target.sandbox, path=LARGE.encode()), timeout=timeout)


def write(caller: Caller, target: Target, timeout: float | None) -> Any:
    what = pb.WriteFileRequest.Target(name=target.sandbox, path=b"files/written")
    messages = pb.WriteFileRequest(target=what), pb.WriteFileRequest(data=bytes(1 << 18))
    return caller.stub.WriteFile(_said(caller, *messages), timeout=timeout)


def download(caller: Caller, target: Target, timeout: float | None) -> Any:
    request = pb.DownloadTreeRequest(name=target.sandbox, path=b"files")
    return caller.stub.DownloadTree(request, timeout=timeout)


def upload(caller: Caller, target: Target, timeout: float | None) -> Any:
    """One file is whole, of the other half has come."""
    what = pb.UploadTreeRequest.Target(name=target.sandbox, path=b"files")
    messages = pb.UploadTreeRequest(target=what), pb.UploadTreeRequest(data=_half_an_archive())
    return caller.stub.UploadTree(_said(caller, *messages), timeout=timeout)


def _half_an_archive() -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as writer:
        for name, size in ((WHOLE, 10), (HALF, 1 << 19)):
            info = tarfile.TarInfo(name)
            info.size = size
            writer.addfile(info, io.BytesIO(bytes(size)))
    return whole.getvalue()[: 1 << 18]


def snapshot(caller: Caller, target: Target, timeout: float | None) -> Any:
    request = pb.SnapshotSandboxRequest(name=target.sandbox, image=target.pool)
    return caller.stub.SnapshotSandbox(request, timeout=timeout)


def _new_id() -> str:
    """Of a command: one whose call ended too soon may have begun all the same."""
    return f"c{uuid.uuid4().hex}"


async def _said(caller: Caller, *messages: Message) -> AsyncIterator[Message]:
    """And nothing after it, nor an end before the call's."""
    for message in messages:
        yield message
    await caller.over.wait()


CALLS: dict[str, Callable[[Caller, Target, float | None], Any]] = {
    call.__name__: call
    for call in (
        acquire, gang, fork, silent, printing, named, detached, run, unstarted, stdin_open, stdin_unread,
        terminal, attach, read, write, download, upload, snapshot,
    )
}  # fmt: skip


class Caller:
    """A client of one connection with one call on it."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self.stub = pb_grpc.SandboxServiceStub(self._channel)
        self.call: Any = None
        self.over = asyncio.Event()

    async def __aenter__(self) -> Caller:
        await self.answered()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.over.set()
        # gRPC would fall over what this still sends when its event loop is gone.
        if (sending := getattr(self.call, "_async_request_poller", None)) is not None:
            async with asyncio.timeout(20):
                await asyncio.wait([sending])
        await self._channel.close()

    async def answered(self) -> None:
        """The daemon has taken what was sent before this."""
        await pb_grpc.PoolServiceStub(self._channel).ListPools(pb.ListPoolsRequest(), timeout=30)

    def begin(self, name: str, target: Target, timeout: float | None = None) -> None:
        """Begins the call; its messages are not read."""
        self.call = CALLS[name](self, target, timeout)

    async def ended(self) -> grpc.StatusCode:
        """How the call ended; reads what was not read before it."""
        async with asyncio.timeout(20):
            if isinstance(self.call, grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall):
                # One that was cancelled here says so by asyncio's error, as if its reader had been.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    async for _ in self.call:
                        pass
            code: grpc.StatusCode = await self.call.code()
            return code


class Victim:
    """A client in a process of its own, to be killed."""

    def __init__(self, address: str) -> None:
        # Forked by a process that has imported all it needs and made no call yet.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_be_killed, args=(address, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def __aenter__(self) -> Victim:
        assert await self._said() == "connected"
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.kill)
        self._process.close()
        self._pipe.close()

    def begin(self, name: str, target: Target) -> None:
        self._pipe.send((name, target, False))

    async def begin_and_hear(self, name: str, target: Target) -> None:
        """Returns when the daemon has taken the call."""
        self._pipe.send((name, target, True))
        assert await self._said() == "answered"

    async def _said(self) -> object:
        # A thread that waits for ever would keep the whole run from ending.
        assert await asyncio.to_thread(self._pipe.poll, 40), "the victim says nothing"
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(40)
        assert self._process.exitcode is not None, "the victim does not die"


def _be_killed(address: str, pipe: Connection) -> None:
    async def call() -> None:
        async with Caller(address) as caller:
            pipe.send("connected")
            name, target, hear = await asyncio.to_thread(pipe.recv)
            caller.begin(name, target)
            if hear:
                await caller.answered()
                pipe.send("answered")
            await asyncio.get_running_loop().create_future()

    asyncio.run(call())


class Served:
    """A daemon in a process of its own, for many cells of the table."""

    def __init__(self, directory: Path, settings: str) -> None:
        self.directory, self.state, self._log = directory, directory / "s", directory / "log"
        self.before = Snapshot.take(self.state)
        config = directory / "daemon.toml"
        config.write_text(settings)
        command = [sys.executable, "-m", "sandboxd", "serve", "--config", str(config)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--state-dir", str(self.state)], stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout
        line = self.process.stdout.readline().decode()
        assert " serving " in line, self.log()
        self.address = line.split(" serving ")[1].split(";")[0]

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        """For whoever has not ended it."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        assert self.process.stdout
        self.process.stdout.close()


def marked(marker: str) -> list[int]:
    """Processes of this host with the marker in their environment."""
    text = f"{MARK}={marker}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and text in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def asleep(pids: Iterable[int]) -> bool:
    """All of these processes wait for something."""
    return all(state_of(pid) == "S" for pid in pids)


def state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not (held if isinstance(held := holds(), bool) else await held):
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def frozen(box: Box) -> AsyncIterator[None]:
    """The sandbox's first process does not run."""
    pid = await pid_of(box)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def prepare(call: str, box: Box, marker: str) -> None:
    """Has a sandbox ready for a call of that name."""
    if call == "attach":
        await box.start(["sh", "-c", HELD], command_id=ATTACHED, env={MARK: marker})
    if call in ("read", "write", "download", "upload"):
        await box.write_file(LARGE, bytes(LARGE_BYTES))


async def written(box: Box) -> list[str]:
    """What a call has put beside the file that was there before, whole or not."""
    names = [os.fsdecode(info.name) for info in await box.list_files("files")]
    return [name for name in names if name != "large"]


async def all_settled(client: Client) -> bool:
    return all(map(is_settled, (await client.list_pools()).values()))


def is_settled(stats: PoolStats) -> bool:
    counts = (stats.starting, stats.warm, stats.active, stats.waiting, stats.deleting)
    return counts == (0, stats.warm_target, 0, 0, 0)


def fault_name(fault: str) -> str:
    return fault.split()[1] if fault else "plain"
