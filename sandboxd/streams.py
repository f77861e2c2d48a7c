"""What the service does with the events of a command and with what its caller says meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace

from sandboxd import wire
from sandboxd.backends.base import Execution
from sandboxd.errors import InvalidRequest
from sandboxd.types import Event, Stderr, Stdout
from sandboxd.v1 import sandbox_service_pb2 as pb


async def joined(events: AsyncIterable[Event]) -> list[Event]:
    """All events, pieces of a stream that follow one another as one: a command may print byte by byte."""
    firsts: list[Event] = []
    data: list[bytearray] = []
    async for event in events:
        if isinstance(event, Stdout | Stderr) and firsts:
            last = firsts[-1]
            if isinstance(last, type(event)) and event.offset == last.offset + len(data[-1]):
                data[-1] += event.data
                continue
        firsts.append(event)
        data.append(bytearray(event.data if isinstance(event, Stdout | Stderr) else b""))
    return [
        replace(first, data=bytes(all_of_it)) if isinstance(first, Stdout | Stderr) else first
        for first, all_of_it in zip(firsts, data, strict=True)
    ]


async def talk(requests: AsyncIterator[pb.InteractCommandRequest], execution: Execution) -> None:
    """Passes on what the caller of a command says. Raises InvalidRequest."""
    async for request in requests:
        match request.WhichOneof("message"):
            case "stdin":
                await execution.write(wire.stdin(request.stdin))
            case "stdin_end":
                await execution.end_input()
            case "signal":
                await execution.signal(wire.signal_number(request.signal))
            case "resize":
                await execution.resize(*wire.terminal_size(request.resize))
            case _:
                raise InvalidRequest("only the first message of InteractCommand may carry `start`")
    await execution.end_input()


async def while_running(task: asyncio.Task[None], events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The events, until their end or until `task` fails, whose error is then raised."""
    while True:
        coming = asyncio.ensure_future(anext(events, None))
        try:
            if not task.done():
                await asyncio.wait({coming, task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            event = await coming
        finally:
            coming.cancel()
            await asyncio.wait([coming])
        if event is None:
            return
        yield event
