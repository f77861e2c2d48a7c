"""The client: leases sandboxes from a daemon, keeps the leases alive, and runs commands in them.

    async with Client() as client:
        async with client.acquire("python") as box:
            result = await box.exec(["python3", "-c", "print(1)"])

Errors are those of `sandboxd.errors`, as the daemon raised them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Unpack

import grpc

from sandboxd import addresses, inspection_replies, replies, requests
from sandboxd.acquisition import Acquisition, countdown
from sandboxd.config import default_address
from sandboxd.errors import NotFound, SandboxdError, SandboxLost
from sandboxd.giving_back import GivingBack, heard
from sandboxd.inspection_replies import SandboxFailure, SandboxReport
from sandboxd.interaction import Interaction
from sandboxd.lifetime import Tasks
from sandboxd.patience import CHANNEL_OPTIONS, Patience
from sandboxd.remote_commands import RemoteCommands
from sandboxd.remote_files import RemoteFiles
from sandboxd.remote_pools import RemotePools
from sandboxd.replies import ExecResult, SandboxInfo
from sandboxd.requests import AcquireOptions, CommandOptions, Word
from sandboxd.resumption import run_command
from sandboxd.sessions import KILL_CHILDREN, SHELL, Dialect, Session, python_dialect
from sandboxd.status import made_by_daemon, translated
from sandboxd.telemetry.propagation import Propagating
from sandboxd.types import POOL_PREFIX, SANDBOX_PREFIX, Event
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc
from sandboxd.wire import RUN_OUTPUT_LIMIT_BYTES

# A lease is renewed when a third of its time has passed, so that two renewals may fail.
RENEW_FRACTION = 1 / 3
# Renewals that lie no further apart than this part of their time are made at once.
RENEW_SLACK = 1 / 20
# A caller whose time has passed waits no longer for what it was granted to be given back.
LATE_SECONDS = 0.5
PATIENCE_SECONDS = 30.0


class Client(RemotePools):
    """A connection to one daemon. `address` is `unix:/path` or `host:port`; the user's own by default.

    A daemon that was there may be away, to be restarted say: calls that may be repeated are, for `patience`
    seconds from the first failure of each, and then raise BackendUnavailable. 0 repeats none.
    """

    def __init__(self, address: str | None = None, *, patience: float = PATIENCE_SECONDS) -> None:
        self.address = address or default_address()
        addresses.check(self.address)
        super().__init__(Patience(patience))
        self._stack = contextlib.AsyncExitStack()
        self._boxes: dict[str, Box] = {}
        self._nudge = asyncio.Event()
        self._next_renewal = math.inf

    async def __aenter__(self) -> Client:
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        await self._stack.enter_async_context(self._channel)
        # Typed as what it stands for.
        channel: Any = Propagating(self._channel)
        self.sandboxes = pb_grpc.SandboxServiceStub(channel)
        self.pools = pb_grpc.PoolServiceStub(channel)
        self._giving_back = GivingBack(self.sandboxes.ReleaseSandbox, self.patience)
        await self._stack.enter_async_context(self._giving_back.run())
        tasks = await self._stack.enter_async_context(Tasks())
        self._renewal = tasks.create_task(self._renew_leases(), name="lease renewal")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renewal.cancel()
        await self._stack.__aexit__(kind, error, trace)

    def acquire(self, pool: str, **options: Unpack[AcquireOptions]) -> Acquisition[Box]:
        """Leases a sandbox: `async with client.acquire(…) as box`, or `box = await client.acquire(…)`.

        Waits up to `timeout` seconds; the lease lasts `ttl` seconds and is renewed while the client lives.
        Raises QueueFull, AcquireTimedOut, StartFailed, PoolNotFound, InvalidRequest, BackendUnavailable.
        """
        if options.get("on_wait") is None:
            request = requests.acquire(pool, options)
            return Acquisition(lambda: self._lease(request, options.get("timeout")), Box.release)
        gang = requests.acquire_gang(pool, 1, options)

        async def lease() -> Box:
            return (await self._lease_gang(gang, options))[0]

        return Acquisition(lease, Box.release)

    def acquire_gang(
        self, pool: str, count: int, **options: Unpack[AcquireOptions]
    ) -> Acquisition[list[Box]]:
        """Leases `count` sandboxes, all or none: `async with client.acquire_gang("python", 8) as boxes`.

        Each has a lease of its own, and may be released before the others. Raises as `acquire`.
        """
        request = requests.acquire_gang(pool, count, options)
        return Acquisition(lambda: self._lease_gang(request, options), _release_all)

    async def inspect(self, sandbox: str) -> SandboxReport:
        """All that is known of a sandbox in any state. Raises SandboxNotFound, LeaseExpired, SandboxLost."""
        name = SANDBOX_PREFIX + sandbox.removeprefix(SANDBOX_PREFIX)
        request = requests.message(pb.InspectSandboxRequest, name=name)
        return inspection_replies.report(await self.answered(self.sandboxes.InspectSandbox, request))

    async def list_failures(self, pool: str | None = None) -> list[SandboxFailure]:
        """Why sandboxes failed of late, the oldest first; of all pools when None. Raises PoolNotFound."""
        request = requests.message(pb.ListFailuresRequest, pool=POOL_PREFIX + pool if pool else "")
        reply = await self.answered(self.sandboxes.ListFailures, request)
        return [inspection_replies.failure(each) for each in reply.failures]

    async def list_sandboxes(self, pool: str | None = None) -> AsyncIterator[SandboxInfo]:
        """All sandboxes, oldest first."""
        name = POOL_PREFIX + pool if pool else ""
        request = requests.message(pb.ListSandboxesRequest, pool=name, page_size=1000)
        while True:
            reply = await self.answered(self.sandboxes.ListSandboxes, request)
            for sandbox in reply.sandboxes:
                yield replies.info(sandbox)
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token

    async def _lease(self, request: pb.AcquireSandboxRequest, timeout: float | None) -> Box:
        left = countdown(timeout)
        self._giving_back.asked_again(request.request_id)

        async def acquire() -> pb.Sandbox:
            async with self._taken_back_when_late(request):
                sandbox: pb.Sandbox = await self.sandboxes.AcquireSandbox(request, timeout=left())
                return sandbox

        try:
            sandbox = await self.patience.call(acquire)
        except asyncio.CancelledError:
            # The grant may be on its way: without this it would hold a sandbox until its time runs out.
            self._giving_back.withdraw(request)
            raise
        return self.keep(sandbox)

    async def _lease_gang(self, request: pb.AcquireSandboxesRequest, options: AcquireOptions) -> list[Box]:
        left, told = countdown(options.get("timeout")), options.get("on_wait")
        self._giving_back.asked_again(request.request_id)
        sandboxes: list[pb.Sandbox] = []

        async def acquire() -> None:
            sandboxes.clear()
            call = self.sandboxes.AcquireSandboxes(request, timeout=left())
            try:
                async with self._taken_back_when_late(request):
                    async for reply in call:
                        if reply.HasField("acquired"):
                            sandboxes.append(reply.acquired)
                        elif told is not None:
                            told(replies.queue_position(reply.waiting))
            finally:
                call.cancel()

        try:
            await self.patience.call(acquire)
        except BaseException as error:
            # As for one; and where the stream broke off, those that came are nobody's.
            if sandboxes or not isinstance(error, SandboxdError):
                self._giving_back.withdraw(request)
            raise
        return [self.keep(sandbox) for sandbox in sandboxes]

    async def lease_forks(self, request: pb.ForkSandboxRequest) -> list[Box]:
        """Leases forks and keeps the leases alive; `Box.fork` builds the request."""
        request.request_id = uuid.uuid4().hex
        try:
            reply = await self.patience.call(lambda: self.sandboxes.ForkSandbox(request))
        except asyncio.CancelledError:
            pool = request.name.removeprefix(SANDBOX_PREFIX).rpartition("-")[0]
            given = pb.AcquireSandboxRequest(pool=POOL_PREFIX + pool, request_id=request.request_id)
            self._giving_back.withdraw(given)
            raise
        return [self.keep(sandbox) for sandbox in reply.sandboxes]

    def keep(self, sandbox: pb.Sandbox) -> Box:
        """Renews a lease that was just given."""
        box = Box(self, sandbox)
        self._boxes[sandbox.name] = box
        if box.renew_at < self._next_renewal:
            self._nudge.set()
        return box

    @contextlib.asynccontextmanager
    async def _taken_back_when_late(
        self, request: pb.AcquireSandboxRequest | pb.AcquireSandboxesRequest
    ) -> AsyncIterator[None]:
        """Where the call's time passes here and not there, the grant may be on its way. It is given back
        before the caller hears of it, who may ask again with the same id.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not made_by_daemon(error):
                await asyncio.wait([self._giving_back.withdraw(request)], timeout=LATE_SECONDS)
            raise

    def end_lease(self, box: Box) -> asyncio.Future[None]:
        """Stops renewing and begins to tell the daemon that the box is no longer needed."""
        self._boxes.pop(box.name, None)
        return self._giving_back.release(box.name, box.ttl)

    async def _renew_leases(self) -> None:
        """Renews each lease when it is due, and with it those that are due soon: they were taken together."""
        while True:
            now = time.monotonic()
            due = [box for box in self._boxes.values() if box.renew_at - box.ttl * RENEW_SLACK <= now]
            await asyncio.gather(*(self._renew(box) for box in due))
            self._nudge.clear()
            self._next_renewal = min((box.renew_at for box in self._boxes.values()), default=now + 3600)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._next_renewal - time.monotonic())):
                    await self._nudge.wait()

    async def _renew(self, box: Box) -> None:
        try:
            await self.answered(self.sandboxes.RenewSandbox, pb.RenewSandboxRequest(name=box.name))
        except (NotFound, SandboxLost) as error:
            box.ended = error
            self._boxes.pop(box.name, None)
            return
        except SandboxdError:
            # The daemon may answer before the lease ends; the next call on the box tells if not.
            pass
        box.renew_at = time.monotonic() + box.ttl * RENEW_FRACTION


async def _release_all(boxes: list[Box]) -> None:
    # Not as tasks: cancelled before their first step they would leave leases that are renewed for ever.
    leaving = [box.begin_release() for box in boxes]
    for told in leaving:
        await heard(told)


class Box(RemoteFiles, RemoteCommands):
    """A leased sandbox. It is yours until `release`, or until the daemon has not heard of you for `ttl`."""

    def __init__(self, client: Client, sandbox: pb.Sandbox) -> None:
        super().__init__(client.sandboxes, sandbox.name)
        self.ttl = sandbox.ttl.ToNanoseconds() / 1e9
        self.renew_at = time.monotonic() + self.ttl * RENEW_FRACTION
        self.ended: SandboxdError | None = None
        """Why the lease ended before its release, once that is known."""
        self._client = client
        self._given = sandbox

    @property
    def info(self) -> SandboxInfo:
        """What the daemon said of it when it was leased."""
        return replies.info(self._given)

    async def release(self) -> None:
        """Ends the lease; the daemon destroys the sandbox. Idempotent; once begun, a cancellation of the
        caller does not end it.

        A daemon that cannot be reached ends the lease by itself when its time runs out.
        """
        await heard(self.begin_release())

    def begin_release(self) -> asyncio.Future[None]:
        """As `release`, for who does not wait; the future has what it failed with."""
        return self._client.end_lease(self)

    @contextlib.asynccontextmanager
    async def fork(
        self, count: int, *, ttl: float | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[list[Box]]:
        """Leases `count` sandboxes whose files are as this one's are now, for the length of the block.

        async with box.fork(4) as forks:
            results = await asyncio.gather(*(fork.exec(["make", "test"]) for fork in forks))

        Processes do not carry over, nor does what lies in `/tmp`. Raises PoolFull, StartFailed, SandboxLost.
        """
        self._check()
        given = None if ttl is None else requests.span(ttl, "ttl")
        request = requests.message(
            pb.ForkSandboxRequest, name=self.name, count=count, ttl=given, labels=labels
        )
        forks = await self._client.lease_forks(request)
        try:
            yield forks
        finally:
            await _release_all(forks)

    async def snapshot(self, image: str) -> int:
        """Stores the sandbox's files as an image of that name, for `image = …` of a pool; returns the bytes
        copied. What carries over is as with `fork`. Raises StartFailed, InvalidRequest, SandboxLost.
        """
        self._check()
        with translated():
            request = requests.message(pb.SnapshotSandboxRequest, name=self.name, image=image)
            reply = await self._stub.SnapshotSandbox(request)
        return int(reply.size_bytes)

    async def exec(
        self, argv: Sequence[Word], *, stdin: bytes = b"", **options: Unpack[CommandOptions]
    ) -> ExecResult:
        """Runs a command to its end and returns all it printed.

        With an `output_limit` of at most 1 MiB that is one message there and one back; else a stream.

        A command that fails, times out or is killed is a result, not an exception. Raises SandboxLost
        when the sandbox died, LeaseExpired when its lease ran out.
        """
        gathered = replies.Gathered()
        if 0 < (options.get("output_limit") or 0) <= RUN_OUTPUT_LIMIT_BYTES:
            self._check()
            request = requests.command(self.name, argv, options, stdin)
            for event in await run_command(self._stub, request, self._client.patience):
                gathered.add(replies.event(event))
        else:
            async for told in self.stream(argv, stdin=stdin, **options):
                gathered.add(told)
        if gathered.result is None:
            raise SandboxLost(f"the command in {self.name} ended without saying how")
        return gathered.result

    async def stream(
        self, argv: Sequence[Word], *, stdin: bytes = b"", **options: Unpack[CommandOptions]
    ) -> AsyncIterator[Event]:
        """Runs a command and yields its events as they come; leaving the iterator kills the command."""
        self._check()
        call = self._stub.ExecCommand(requests.command(self.name, argv, options, stdin))
        try:
            with translated():
                async for response in call:
                    yield replies.event(response)
        finally:
            call.cancel()

    @contextlib.asynccontextmanager
    async def interact(
        self, argv: Sequence[Word], **options: Unpack[CommandOptions]
    ) -> AsyncIterator[Interaction]:
        """Runs a command that is talked to while it runs; leaving the block kills it.

        async with box.interact(["python3", "-i"], terminal=(24, 80)) as running:
            await running.write(b"print(6 * 7)\\n")
            async for event in running: ...
        """
        self._check()
        running = Interaction(self._stub.InteractCommand())
        try:
            await running.start(requests.command(self.name, argv, options))
            yield running
        finally:
            await running.close()

    def shell(self, **options: Unpack[CommandOptions]) -> AbstractAsyncContextManager[Session]:
        """A bash that stays: directory, variables and functions outlive each `run` of the block.

        async with box.shell() as shell:
            await shell.run("cd /tmp; count=3")
            result = await shell.run("pwd; echo $count", timeout=5)
        """
        return self._session(SHELL, options)

    def python(self, **options: Unpack[CommandOptions]) -> AbstractAsyncContextManager[Session]:
        """A Python that stays: what code imports and defines outlives each `run` of the block."""
        return self._session(python_dialect(), options)

    @contextlib.asynccontextmanager
    async def _session(self, dialect: Dialect, options: CommandOptions) -> AsyncIterator[Session]:
        async def kill_children(pid: int) -> None:
            await self.exec(["sh", "-c", KILL_CHILDREN, "sh", str(pid)])

        async with self.interact(dialect.argv, **options) as running:
            session = Session(running, dialect, kill_children)
            await session.open()
            yield session

    def _check(self) -> None:
        if self.ended is not None:
            raise self.ended

    def __repr__(self) -> str:
        return f"<Box {self.name.removeprefix(SANDBOX_PREFIX)}>"
