"""Named commands of the fake backend: each is a task of this process until it ends or its sandbox does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from sandboxd.backends.host_process import HostProcess
from sandboxd.errors import BackendUnavailable, CommandExists, CommandNotFound
from sandboxd.guest.replay import ENDED_LIMIT, Replay
from sandboxd.types import Command, CommandInfo, Event, Exited, Kept, Started, Stderr, Stdout


class FakeCommands:
    """Implements `base.Commands`; `check` raises when the sandbox is dead."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        # The ended ones in the order of their ends.
        self._records: dict[str, _Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def start(self, command: Command, process: HostProcess) -> AsyncIterator[_Follower]:
        """Runs a named command; leaving the block ends it unless it is detached. Raises CommandExists."""
        if command.id in self._records:
            raise CommandExists.named(command.id)
        record = self._records[command.id] = _Record(process, resumable=command.resumable)
        record.task = asyncio.create_task(self._run(command.id, record), name=f"command {command.id}")
        self._tasks.add(record.task)
        record.task.add_done_callback(self._tasks.discard)
        record.task.add_done_callback(lambda _: record.wake())
        try:
            yield _Follower(record, self._check, (0, 0), command.id)
        finally:
            if not command.detached:
                record.cancelled = command.resumable and record.exited is None
                process.kill_tree()

    @contextlib.asynccontextmanager
    async def attach(
        self, command_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncIterator[_Follower]:
        """See `base.Commands`."""
        record = self._record(command_id)
        record.check(command_id)
        yield _Follower(record, self._check, (stdout_offset, stderr_offset), command_id)

    async def signal(self, command_id: str, number: int) -> None:
        """See `base.Commands`."""
        await self._record(command_id).signal(number)

    async def known(self) -> list[CommandInfo]:
        """See `base.Commands`."""
        self._check()
        return [
            record.info(command_id) for command_id, record in self._records.items() if not record.resumable
        ]

    async def forget(self, command_id: str) -> None:
        """See `base.Commands`."""
        self._record(command_id).process.kill_tree()
        del self._records[command_id]

    def kill(self) -> None:
        """Kills what runs; its tasks then end by themselves."""
        for record in self._records.values():
            record.process.kill_tree()

    async def end(self) -> None:
        """Returns when no task is left."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _record(self, command_id: str) -> _Record:
        self._check()
        if command_id not in self._records:
            raise CommandNotFound.named(command_id)
        return self._records[command_id]

    async def _run(self, command_id: str, record: _Record) -> None:
        async with record.process.running() as events:
            async for event in events:
                record.hear(event)
                if record.exited and self._records.get(command_id) is record:
                    self._keep_ended(command_id)

    def _keep_ended(self, command_id: str) -> None:
        self._records[command_id] = self._records.pop(command_id)
        ended = [name for name, each in self._records.items() if each.exited]
        for name in ended[:-ENDED_LIMIT]:
            del self._records[name]


class _Record:
    """One named command: the last of what it told, and an event for who waits for more."""

    task: asyncio.Task[None]

    def __init__(self, process: HostProcess, *, resumable: bool) -> None:
        self.process = process
        self.resumable = resumable
        # Its caller left: whoever asks for its end is told that, not how it was killed.
        self.cancelled = False
        self.started = False
        self.exited: Exited | None = None
        self.streams: dict[type[Stdout | Stderr], Replay] = {Stdout: Replay(), Stderr: Replay()}
        self.more = asyncio.Event()

    def hear(self, event: Event) -> None:
        match event:
            case Started():
                self.started = True
            case Stdout(data, offset) | Stderr(data, offset):
                self.streams[type(event)].add(offset, data)
            case Exited():
                self.exited = event
        self.wake()

    def wake(self) -> None:
        self.more.set()
        self.more = asyncio.Event()

    def check(self, command_id: str) -> None:
        """Raises BackendUnavailable when its caller left."""
        if self.cancelled:
            raise BackendUnavailable.ended_with_call(command_id)

    async def signal(self, number: int) -> None:
        await self.process.input.decided.wait()
        self.process.signal(number)

    def info(self, command_id: str) -> CommandInfo:
        kept = [Kept(stream.begin, stream.end) for stream in self.streams.values()]
        return CommandInfo(command_id, self.exited is None, *kept)


class _Follower:
    """Implements `base.Execution` for one reader of a named command, which has no terminal."""

    def __init__(
        self, record: _Record, check: Callable[[], None], offsets: tuple[int, int], command_id: str
    ) -> None:
        self._record, self._check, self._id = record, check, command_id
        self._next: dict[type[Stdout | Stderr], int] = {Stdout: offsets[0], Stderr: offsets[1]}
        self._told_start = False
        self._told_end = False

    async def write(self, data: bytes) -> None:
        """Its input came whole with its start."""

    async def end_input(self) -> None:
        """It has ended."""

    async def signal(self, number: int) -> None:
        """See `base.Execution`."""
        await self._record.signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        """There is no terminal."""

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._told_end:
            raise StopAsyncIteration
        while True:
            more = self._record.more
            self._check()
            if (event := self._event()) is not None:
                return event
            if self._record.task.done():
                self._record.task.result()
            await more.wait()

    def _event(self) -> Event | None:
        record = self._record
        if record.started and not self._told_start:
            self._told_start = True
            return Started()
        for kind, stream in record.streams.items():
            found = stream.after(self._next[kind])
            if found is not None:
                offset, data = found
                self._next[kind] = offset + len(data)
                return kind(data, offset)
        self._told_end = record.exited is not None
        if record.exited is not None:
            record.check(self._id)
        return record.exited
