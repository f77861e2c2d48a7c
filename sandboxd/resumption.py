"""A bounded command that rides over the death of the daemon: run once, and asked for its end again."""

from __future__ import annotations

import uuid
from typing import Any

import grpc

from sandboxd.errors import CommandNotFound, InvalidRequest
from sandboxd.patience import Patience, is_away
from sandboxd.status import from_rpc_error
from sandboxd.v1 import sandbox_service_pb2 as pb

Events = list[pb.ExecCommandResponse]


async def run_command(stub: Any, request: pb.ExecCommandRequest, patience: Patience) -> Events:
    """The events of the command, which runs no more than once. Raises what the daemon raised, and
    BackendUnavailable when the daemon stays away, or its sandboxes keep no commands to ask for.
    """
    request.resume_id = f"r{uuid.uuid4().hex}"
    lost: list[grpc.aio.AioRpcError] = []
    heard = False

    def answered() -> bool:
        """Whether a daemon had begun to tell of the command, asked once."""
        nonlocal heard
        before, heard = heard, False
        return before

    async def run() -> Events:
        try:
            return list((await stub.RunCommand(request)).events) if not lost else await ask_again()
        except grpc.aio.AioRpcError as error:
            if is_away(error):
                lost.append(error)
            raise

    async def ask_again() -> Events:
        attach = pb.AttachCommandRequest(name=request.name, command_id=request.resume_id)
        nonlocal heard
        events: Events = []
        try:
            async for event in stub.AttachCommand(attach):
                heard = True
                events.append(event)
            return events
        except grpc.aio.AioRpcError as error:
            match from_rpc_error(error):
                case CommandNotFound():
                    # The daemon died before the sandbox had heard of it.
                    return list((await stub.RunCommand(request)).events)
                case InvalidRequest():
                    raise lost[0] from error
            raise

    result: Events = await patience.call(run, answered=answered)
    return result
