"""The last commands of each sandbox and the end of what they printed, for a person who looks into one.

Heard in passing, only while there is a page; bounded in commands, bytes and sandboxes. A command that keeps
its own output (`Command.id`) is left out: it is asked itself.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from sandboxd.backends.base import Commands, Connection, Execution, Files
from sandboxd.clock import Clock
from sandboxd.types import Command, Event, Exited, Stderr, Stdout

COMMANDS_KEPT = 4
TAIL_BYTES = 4096
SANDBOXES_KEPT = 1024
ARGV_CHARACTERS = 400


class Transcript:
    """One command: what it is, when it began (seconds since 1970), the end of its output, how it ended."""

    def __init__(self, number: int, command: Command, began: float) -> None:
        self._number = number
        # Made readable when somebody looks.
        self._argv = command.argv
        self._began = began
        self._tails = (bytearray(), bytearray())
        self._sizes = [0, 0]
        self._ended: str | None = None

    def hear(self, event: Event) -> None:
        """What the command told."""
        if isinstance(event, Stdout | Stderr):
            stream = int(isinstance(event, Stderr))
            tail = self._tails[stream]
            tail += event.data[-TAIL_BYTES:]
            if len(tail) > 2 * TAIL_BYTES:
                del tail[:-TAIL_BYTES]
            self._sizes[stream] = event.offset + len(event.data)
        elif isinstance(event, Exited):
            self._ended = ending(event)

    def leave(self) -> None:
        """Its caller does not listen any more."""
        if self._ended is None:
            self._ended = "ended with its call"

    def row(self) -> dict[str, Any]:
        """For the page."""
        out, err = (bytes(tail[-TAIL_BYTES:]).decode(errors="replace") for tail in self._tails)
        argv = shlex.join(word.decode(errors="replace") for word in self._argv)
        return {
            "id": f"#{self._number}",
            "argv": argv[:ARGV_CHARACTERS],
            "began": round(self._began, 3),
            "running": self._ended is None,
            "ended": self._ended,
            "stdout": out,
            "stderr": err,
            "stdout_bytes": self._sizes[0],
            "stderr_bytes": self._sizes[1],
        }


def ending(event: Exited) -> str:
    """How a command ended, in words."""
    words = event.reason.name.lower().replace("_", " ")
    if words == "exited":
        words = f"exit code {event.exit_code}"
    elif event.signal:
        words = f"{words} by signal {event.signal}"
    return f"{words} after {event.wall:.2f} s"


class Transcripts:
    """Of all sandboxes; those that were used least lately are forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, deque[Transcript]] = OrderedDict()
        self._begun = 0

    def of(self, sandbox_id: str) -> list[dict[str, Any]]:
        """The oldest first."""
        return [each.row() for each in self._kept.get(sandbox_id, ())]

    def heard(self, sandbox_id: str, connection: Connection) -> Connection:
        """A connection whose commands are heard."""
        return _Heard(self, sandbox_id, connection)

    def begin(self, sandbox_id: str, command: Command) -> Transcript:
        """A new command of a sandbox."""
        kept = self._kept.get(sandbox_id)
        if kept is None:
            kept = self._kept[sandbox_id] = deque(maxlen=COMMANDS_KEPT)
            if len(self._kept) > SANDBOXES_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(sandbox_id)
        self._begun += 1
        transcript = Transcript(self._begun, command, self._clock.wall())
        kept.append(transcript)
        return transcript


class _Heard:
    """A connection; everything but `exec` is the other's."""

    def __init__(self, transcripts: Transcripts, sandbox_id: str, connection: Connection) -> None:
        self._transcripts, self._sandbox, self._connection = transcripts, sandbox_id, connection

    def exec(self, command: Command) -> AbstractAsyncContextManager[Execution]:
        execution = self._connection.exec(command)
        if command.id and not command.resumable:
            return execution
        return _HeardExec(execution, self._transcripts.begin(self._sandbox, command))

    async def ping(self) -> None:
        await self._connection.ping()

    @property
    def files(self) -> Files:
        return self._connection.files

    @property
    def commands(self) -> Commands:
        return self._connection.commands

    async def wait_lost(self) -> str:
        return await self._connection.wait_lost()

    async def close(self) -> None:
        await self._connection.close()


class _HeardExec(contextlib.AbstractAsyncContextManager[Execution]):
    def __init__(self, execution: AbstractAsyncContextManager[Execution], transcript: Transcript) -> None:
        self._execution, self._transcript = execution, transcript

    async def __aenter__(self) -> Execution:
        try:
            return _HeardExecution(await self._execution.__aenter__(), self._transcript)
        except BaseException:
            self._transcript.leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._transcript.leave()
        return await self._execution.__aexit__(kind, error, trace)


class _HeardExecution:
    def __init__(self, execution: Execution, transcript: Transcript) -> None:
        self._execution, self._transcript = execution, transcript
        self._events: AsyncIterator[Event] | None = None
        self.write, self.end_input = execution.write, execution.end_input
        self.signal, self.resize = execution.signal, execution.resize

    def __aiter__(self) -> AsyncIterator[Event]:
        self._events = aiter(self._execution)
        return self

    async def __anext__(self) -> Event:
        if self._events is None:
            raise AssertionError("iterate over it first")
        event = await anext(self._events)
        self._transcript.hear(event)
        return event
