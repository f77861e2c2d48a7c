"""One command as a plain process of this host, for the fake backend: its events, and its whole tree's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout

PIECE_BYTES = 64 * 1024
# Events that wait for their reader; past them the command waits, too.
EVENTS_AHEAD = 16
# A background child that keeps the output open delays the end by no more than this.
OUTPUT_GRACE_SECONDS = 0.2
# Every process of a command inherits this variable: how a kill finds those that left its group.
MARK = b"SANDBOXD_FAKE_COMMAND"
SEARCH_PATH = b"/usr/local/bin:/usr/bin:/bin"


class HostProcess:
    """A command on its way; `events` starts it, `kill_tree` ends it and all that it started."""

    def __init__(self, command: Command, env: dict[bytes, bytes], cwd: Path) -> None:
        self._command = command
        self._cwd = cwd
        self._mark = MARK + b"=" + os.urandom(8).hex().encode()
        mark = {MARK: self._mark.partition(b"=")[2]}
        self._env = {b"PATH": SEARCH_PATH, b"HOME": os.fsencode(cwd), **env, **command.env, **mark}
        self._killed_for: ExitReason | None = None
        self._output_bytes = 0

    async def events(self) -> AsyncIterator[Event]:
        """Runs the command and yields its events, `Exited` last."""
        begin = time.monotonic()
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._cwd,
                env=self._env,
                start_new_session=True,
            )
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError | NotADirectoryError) else 126
            name = os.fsdecode(self._command.argv[0])
            yield Exited(ExitReason.NOT_STARTED, exit_code=code, detail=f"{name}: {error.strerror}")
            return
        yield Started()
        async for event in self._output(process):
            yield event
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
        yield self._exited(process.returncode or 0, time.monotonic() - begin, spent)

    async def _output(self, process: asyncio.subprocess.Process) -> AsyncIterator[Event]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue(EVENTS_AHEAD)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run(process, queue))
            try:
                while (event := await queue.get()) is not None:
                    yield event
            except BaseException:
                self.kill_tree()
                raise

    async def _run(self, process: asyncio.subprocess.Process, queue: asyncio.Queue[Event | None]) -> None:
        if not (process.stdin and process.stdout and process.stderr):
            raise AssertionError("the process was started with pipes")
        readers = [
            asyncio.create_task(self._read(process.stdout, Stdout, queue)),
            asyncio.create_task(self._read(process.stderr, Stderr, queue)),
        ]
        feeder = asyncio.create_task(self._feed(process.stdin))
        try:
            try:
                async with asyncio.timeout(self._command.timeout):
                    await process.wait()
            except TimeoutError:
                self._killed_for = self._killed_for or ExitReason.TIMED_OUT
                self.kill_tree()
                await process.wait()
            _, late = await asyncio.wait(readers, timeout=OUTPUT_GRACE_SECONDS)
            for reader in late:
                reader.cancel()
        finally:
            for task in (*readers, feeder):
                task.cancel()
        await queue.put(None)

    async def _feed(self, stdin: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            stdin.write(self._command.stdin)
            await stdin.drain()
            stdin.close()
            await stdin.wait_closed()

    async def _read(
        self, stream: asyncio.StreamReader, kind: type[Stdout | Stderr], queue: asyncio.Queue[Event | None]
    ) -> None:
        offset = 0
        limit = self._command.output_limit
        while data := await stream.read(PIECE_BYTES):
            kept = data if limit is None else data[: max(0, limit - self._output_bytes)]
            self._output_bytes += len(data)
            if kept:
                await queue.put(kind(kept, offset))
                offset += len(kept)
            if len(kept) < len(data) and self._killed_for is None:
                self._killed_for = ExitReason.OUTPUT_LIMIT_EXCEEDED
                self.kill_tree()

    def _exited(self, returncode: int, wall: float, cpu: float) -> Exited:
        if self._killed_for is not None:
            return Exited(self._killed_for, signal=signal.SIGKILL, wall=wall, cpu=cpu)
        if returncode < 0:
            return Exited(ExitReason.SIGNALED, signal=-returncode, wall=wall, cpu=cpu)
        return Exited(ExitReason.EXITED, exit_code=returncode, wall=wall, cpu=cpu)

    def kill_tree(self) -> None:
        """Kills every process that carries this command's mark, until a pass finds none."""
        while pids := self._marked():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _marked(self) -> list[int]:
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self._mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found
