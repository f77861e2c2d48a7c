"""What the service does with the events of a command and with what its caller says meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
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


async def conversation(
    requests: AsyncIterator[pb.InteractCommandRequest], execution: Execution
) -> AsyncGenerator[Event, None]:
    """The events of a command, whose caller talks to it meanwhile. Raises InvalidRequest for what it says.

    gRPC ends the messages of a call that is cut off, too, before it cancels the handler. So the command hears
    of their end only after one more event was sent, for none can be when the call is cut off.
    """
    talking = asyncio.create_task(_talk(requests, execution))
    events = aiter(execution)
    coming: asyncio.Task[Event | None] | None = None
    offset, begun = 0, False
    try:
        while True:
            coming = coming or asyncio.create_task(_next(events))
            if not talking.done():
                await asyncio.wait((coming, talking), return_when=asyncio.FIRST_COMPLETED)
            if talking.done() and talking.result() and begun:
                yield Stdout(b"", offset)
                talking = asyncio.create_task(_end_input(execution))
                continue
            event, coming = await coming, None
            if event is None:
                return
            begun = True
            if isinstance(event, Stdout):
                offset = event.offset + len(event.data)
            yield event
    finally:
        left = [task for task in (talking, coming) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _talk(requests: AsyncIterator[pb.InteractCommandRequest], execution: Execution) -> bool:
    """Passes on what the caller of a command says. True if it has not said the end of the input."""
    is_open = True
    async for request in requests:
        match request.WhichOneof("message"):
            case "stdin":
                await execution.write(wire.stdin(request.stdin))
            case "stdin_end":
                await execution.end_input()
                is_open = False
            case "signal":
                await execution.signal(wire.signal_number(request.signal))
            case "resize":
                await execution.resize(*wire.terminal_size(request.resize))
            case _:
                raise InvalidRequest("only the first message of InteractCommand may carry `start`")
    return is_open


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _end_input(execution: Execution) -> bool:
    await execution.end_input()
    return False
