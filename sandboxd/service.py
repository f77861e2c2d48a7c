"""The gRPC skin of the pools: decode, one call, encode. Whatever fails is mapped by `status`.

Handlers own nothing: what they begin, the pool's own tasks finish, since a handler may be cut off at any
await when its client leaves or the server stops.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import empty_pb2
from grpc_status import rpc_status

from sandboxd import inspection_wire, wire
from sandboxd.backends.base import Commands, Files
from sandboxd.errors import Internal, InvalidRequest, SandboxdError
from sandboxd.gate import Gate
from sandboxd.pools import Pools
from sandboxd.status import to_status
from sandboxd.streams import conversation, joined
from sandboxd.telemetry.recorder import ran
from sandboxd.types import Exited, QueuePosition
from sandboxd.uploads import upload
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc
from sandboxd.waiters import Watch

logger = logging.getLogger(__name__)

# A call without a deadline waits this long for a sandbox, so that a forgotten caller leaves the queue.
LONGEST_WAIT_SECONDS = 3600.0
# What the caller's own clock may lose on the way: the reply must arrive before its deadline.
DEADLINE_MARGIN_SECONDS = 0.05

Context = grpc.aio.ServicerContext[Any, Any]
Handler = TypeVar("Handler", bound=Callable[..., Any])


async def _abort(context: Context, error: SandboxdError) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status raises")


def _unexpected(name: str, error: Exception) -> Internal:
    logger.exception("%s failed", name)
    return Internal(f"{type(error).__name__}: {error}")


def unary(handler: Callable[[Any, Any, Context], Awaitable[Any]]) -> Any:
    """Has a unary handler of a service begin through its `gate`, and maps what it raises to a status."""

    @functools.wraps(handler)
    async def mapped(self: Any, request: Any, context: Context) -> Any:
        await self.gate.passed()
        try:
            return await handler(self, request, context)
        except SandboxdError as error:
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, _unexpected(handler.__name__, error))
            raise

    return mapped


def streaming(handler: Callable[[Any, Any, Context], AsyncIterator[Any]]) -> Any:
    """As `unary`, for a handler that answers with a stream."""

    @functools.wraps(handler)
    async def mapped(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:
        await self.gate.passed()
        try:
            async for response in handler(self, request, context):
                yield response
        except SandboxdError as error:
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, _unexpected(handler.__name__, error))
            raise

    return mapped


def _patience(context: Context) -> float:
    """How long a call may wait, in seconds."""
    remaining = context.time_remaining()
    timeout = LONGEST_WAIT_SECONDS if remaining is None else remaining - DEADLINE_MARGIN_SECONDS
    return float(min(max(timeout, 0.0), LONGEST_WAIT_SECONDS))


class SandboxService(pb_grpc.SandboxServiceServicer):
    """Leases and their use. Calls begin through `gate`."""

    def __init__(self, pools: Pools, gate: Gate) -> None:
        self._pools = pools
        self.gate = gate

    @unary
    async def AcquireSandbox(self, request: pb.AcquireSandboxRequest, context: Context) -> pb.Sandbox:
        pool = self._pools.named(request.pool)
        lease, claim = wire.lease(request), wire.claim(request)
        return self._pools.encode(pool, await pool.acquire(lease, claim, timeout=_patience(context)))

    @unary
    async def AcquireSandboxes(self, request: pb.AcquireSandboxesRequest, context: Context) -> None:
        async def told(position: QueuePosition) -> None:
            await context.write(pb.AcquireSandboxesResponse(waiting=wire.queue_position(position)))

        pool, interval = self._pools.named(request.pool), wire.position_interval(request)
        sandboxes = await pool.acquire_all(
            wire.lease(request),
            wire.claim(request),
            timeout=_patience(context),
            watch=None if interval is None else Watch(interval, told),
        )
        for sandbox in sandboxes:
            await context.write(pb.AcquireSandboxesResponse(acquired=self._pools.encode(pool, sandbox)))

    @unary
    async def RenewSandbox(self, request: pb.RenewSandboxRequest, context: Context) -> pb.Sandbox:
        pool, sandbox_id = self._pools.holding(request.name)
        ttl = wire.seconds(request.ttl, "ttl") if request.HasField("ttl") else None
        return self._pools.encode(pool, pool.renew(sandbox_id, ttl))

    @unary
    async def ReleaseSandbox(self, request: pb.ReleaseSandboxRequest, context: Context) -> empty_pb2.Empty:
        if request.request_id:
            self._pools.named(request.pool).release_request(request.request_id)
        else:
            pool, sandbox_id = self._pools.holding(request.name)
            pool.release(sandbox_id)
        return empty_pb2.Empty()

    @unary
    async def GetSandbox(self, request: pb.GetSandboxRequest, context: Context) -> pb.Sandbox:
        pool, sandbox_id = self._pools.holding(request.name)
        return self._pools.encode(pool, pool.get(sandbox_id))

    @unary
    async def ListSandboxes(
        self, request: pb.ListSandboxesRequest, context: Context
    ) -> pb.ListSandboxesResponse:
        pools = [self._pools.named(request.pool)] if request.pool else self._pools.every()
        entries = [(pool, sandbox) for pool in pools for sandbox in pool.sandboxes()]
        entries.sort(key=lambda entry: (entry[1].created, entry[1].id))
        page, token = wire.page(entries, request.page_size, request.page_token)
        encoded = [self._pools.encode(pool, sandbox) for pool, sandbox in page]
        return pb.ListSandboxesResponse(sandboxes=encoded, next_page_token=token)

    @unary
    async def InspectSandbox(
        self, request: pb.InspectSandboxRequest, context: Context
    ) -> pb.InspectSandboxResponse:
        pool, sandbox_id = self._pools.holding(request.name)
        known = await pool.inspect(sandbox_id)
        return inspection_wire.inspection(pool.name, known, self._pools.calendar_offset)

    @unary
    async def ListFailures(
        self, request: pb.ListFailuresRequest, context: Context
    ) -> pb.ListFailuresResponse:
        pools = [self._pools.named(request.pool)] if request.pool else list(self._pools.by_name.values())
        failures = sorted((each for pool in pools for each in pool.failures()), key=lambda each: each.when)
        return pb.ListFailuresResponse(failures=[inspection_wire.failure(each) for each in failures])

    @unary
    async def ForkSandbox(self, request: pb.ForkSandboxRequest, context: Context) -> pb.ForkSandboxResponse:
        pool, sandbox_id = self._pools.holding(request.name)
        forks = await pool.fork(sandbox_id, wire.fork_count(request), wire.lease(request))
        return pb.ForkSandboxResponse(sandboxes=[self._pools.encode(pool, fork) for fork in forks])

    @unary
    async def SnapshotSandbox(
        self, request: pb.SnapshotSandboxRequest, context: Context
    ) -> pb.SnapshotSandboxResponse:
        pool, sandbox_id = self._pools.holding(request.name)
        size = await pool.snapshot(sandbox_id, wire.image_name(request))
        return pb.SnapshotSandboxResponse(size_bytes=size)

    @streaming
    async def ExecCommand(
        self, request: pb.ExecCommandRequest, context: Context
    ) -> AsyncIterator[pb.ExecCommandResponse]:
        pool, sandbox_id = self._pools.holding(request.name)
        async with pool.connection(sandbox_id).exec(wire.command(request)) as events:
            async for event in events:
                yield wire.event(event)

    @unary
    async def RunCommand(self, request: pb.ExecCommandRequest, context: Context) -> pb.RunCommandResponse:
        pool, sandbox_id = self._pools.holding(request.name)
        async with pool.connection(sandbox_id).exec(wire.bounded_command(request)) as events:
            told = await joined(events)
            last = told[-1] if told else None
            if isinstance(last, Exited):
                # The message says it, too, but to take it apart again costs more than to make it.
                ran(sandbox_id, last)
            return pb.RunCommandResponse(events=[wire.event(event) for event in told])

    @streaming
    async def InteractCommand(
        self, requests: AsyncIterator[pb.InteractCommandRequest], context: Context
    ) -> AsyncIterator[pb.ExecCommandResponse]:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequest("the first message of InteractCommand must carry `start`")
        pool, sandbox_id = self._pools.holding(first.start.name)
        command = wire.command(first.start, interactive=True)
        async with pool.connection(sandbox_id).exec(command) as execution:
            async with contextlib.aclosing(conversation(requests, execution)) as events:
                async for event in events:
                    yield wire.event(event)

    @streaming
    async def AttachCommand(
        self, request: pb.AttachCommandRequest, context: Context
    ) -> AsyncIterator[pb.ExecCommandResponse]:
        commands, offsets = self._commands(request.name), wire.offsets(request)
        async with commands.attach(wire.command_id(request.command_id), **offsets) as events:
            async for event in events:
                yield wire.event(event)

    @unary
    async def SignalCommand(self, request: pb.SignalCommandRequest, context: Context) -> empty_pb2.Empty:
        number = wire.signal_number(request.signal)
        await self._commands(request.name).signal(wire.command_id(request.command_id), number)
        return empty_pb2.Empty()

    @unary
    async def ListCommands(
        self, request: pb.ListCommandsRequest, context: Context
    ) -> pb.ListCommandsResponse:
        known = await self._commands(request.name).known()
        return pb.ListCommandsResponse(commands=[wire.command_info(info) for info in known])

    @unary
    async def ForgetCommand(self, request: pb.ForgetCommandRequest, context: Context) -> empty_pb2.Empty:
        await self._commands(request.name).forget(wire.command_id(request.command_id))
        return empty_pb2.Empty()

    @unary
    async def WriteFile(
        self, requests: AsyncIterator[pb.WriteFileRequest], context: Context
    ) -> pb.WriteFileResponse:
        async with upload(requests, context) as (target, data):
            mode = wire.file_mode(target.mode)
            size = await self._files(target.name).write(wire.path(target.path), data, mode)
            return pb.WriteFileResponse(size_bytes=size)

    @streaming
    async def ReadFile(
        self, request: pb.ReadFileRequest, context: Context
    ) -> AsyncIterator[pb.ReadFileResponse]:
        files = self._files(request.name)
        offset, limit = wire.file_range(request)
        async for data in files.read(wire.path(request.path), offset=offset, limit=limit):
            yield pb.ReadFileResponse(data=data)

    @unary
    async def StatFile(self, request: pb.StatFileRequest, context: Context) -> pb.FileInfo:
        return wire.file_info(await self._files(request.name).stat(wire.path(request.path)))

    @streaming
    async def ListFiles(
        self, request: pb.ListFilesRequest, context: Context
    ) -> AsyncIterator[pb.ListFilesResponse]:
        page, size = pb.ListFilesResponse(), 0
        async for info in self._files(request.name).list_directory(wire.path(request.path)):
            page.files.append(wire.file_info(info))
            size += len(info.name) + len(info.target)
            if len(page.files) == wire.FILES_AT_ONCE or size > wire.NAMES_AT_ONCE_BYTES:
                yield page
                page, size = pb.ListFilesResponse(), 0
        yield page

    @unary
    async def RemoveFile(self, request: pb.RemoveFileRequest, context: Context) -> empty_pb2.Empty:
        await self._files(request.name).remove(wire.path(request.path), recursive=request.recursive)
        return empty_pb2.Empty()

    @unary
    async def UploadTree(
        self, requests: AsyncIterator[pb.UploadTreeRequest], context: Context
    ) -> pb.UploadTreeResponse:
        async with upload(requests, context) as (target, archive):
            count = await self._files(target.name).unpack(wire.path(target.path), archive)
            return pb.UploadTreeResponse(entry_count=count)

    @streaming
    async def DownloadTree(
        self, request: pb.DownloadTreeRequest, context: Context
    ) -> AsyncIterator[pb.DownloadTreeResponse]:
        async for data in self._files(request.name).pack(wire.path(request.path)):
            yield pb.DownloadTreeResponse(data=data)

    def _commands(self, name: str) -> Commands:
        pool, sandbox_id = self._pools.holding(name)
        return pool.connection(sandbox_id).commands

    def _files(self, name: str) -> Files:
        pool, sandbox_id = self._pools.holding(name)
        return pool.connection(sandbox_id).files
