"""One command as a plain process of this host, for the fake backend: its events, and its whole tree's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from sandboxd.guest.output import Budget, Trimmer
from sandboxd.lifetime import ended, whole
from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout

PIECE_BYTES = 64 * 1024
# Events that wait for their reader; past them the command waits, too.
EVENTS_AHEAD = 16
# Of what such a child goes on to print, no more than this is read: pipe and buffer hold less.
LATE_BYTES = 256 * 1024
# A background child that keeps the output open delays the end by no more than this.
OUTPUT_GRACE_SECONDS = 0.2
# Every process of a command inherits this variable: how a kill finds those that left its group.
MARK = b"SANDBOXD_FAKE_COMMAND"
SEARCH_PATH = b"/usr/local/bin:/usr/bin:/bin"


@contextlib.asynccontextmanager
async def _reading(pipes: list[IO[bytes]]) -> AsyncIterator[asyncio.StreamReader]:
    """Reads the first of these pipes, which is the loop's from now on."""
    pipe = pipes.pop(0)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    connecting = loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    transport, _ = await whole(connecting, lambda made: made[0].close())
    try:
        yield reader
    finally:
        # A background child may hold the other end open for long.
        transport.close()


class _Input:
    """The writing end of an interactive command's standard input; open from its start to its end."""

    def __init__(self) -> None:
        self.fd = -1
        self.decided = asyncio.Event()
        """The command has been started, or never will be."""
        self._room: asyncio.Event | None = None

    async def write(self, data: bytes) -> None:
        """Waits while the command does not read; what nobody will read is dropped."""
        await self.decided.wait()
        view = memoryview(data)
        while view and self.fd >= 0:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                await self._writable()
            except OSError:
                return

    async def _writable(self) -> None:
        """Returns when the pipe takes more, nobody reads it any more, or it was closed."""
        loop = asyncio.get_running_loop()
        room = self._room = asyncio.Event()
        loop.add_writer(self.fd, room.set)
        try:
            await room.wait()
        finally:
            if self._room is room:
                self._forget()

    def _forget(self) -> None:
        asyncio.get_running_loop().remove_writer(self.fd)
        self._room = None

    def close(self) -> None:
        """Also under a `write` that waits."""
        if self._room is not None:
            # First: later the number may be another descriptor's, of which the loop would then hear no more.
            self._room.set()
            self._forget()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class _Execution:
    """Implements `base.Execution`, without terminals: what the command's task puts into the queue, until
    `Exited`; its failure is raised here.
    """

    def __init__(self, process: HostProcess, queue: asyncio.Queue[Event], task: asyncio.Task[None]) -> None:
        self._process, self._queue, self._task, self._over = process, queue, task, False

    async def write(self, data: bytes) -> None:
        await self._process.input.write(data)

    async def end_input(self) -> None:
        await self._process.input.decided.wait()
        self._process.input.close()

    async def signal(self, number: int) -> None:
        await self._process.input.decided.wait()
        self._process.signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        """There is no terminal."""

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        if self._queue.empty() and not self._task.done():
            taken = asyncio.ensure_future(self._queue.get())
            try:
                await asyncio.wait({taken, self._task}, return_when=asyncio.FIRST_COMPLETED)
                event = await taken if taken.done() else self._next_at_end()
            finally:
                taken.cancel()
        else:
            event = self._next_at_end()
        self._over = isinstance(event, Exited)
        return event

    def _next_at_end(self) -> Event:
        if self._queue.empty():
            self._task.result()
        return self._queue.get_nowait()


class HostProcess:
    """A command on its way; `running` starts it, `kill_tree` ends it and all that it started."""

    def __init__(self, command: Command, env: dict[bytes, bytes], cwd: Path) -> None:
        self._command = command
        self._cwd = cwd
        self._mark = MARK + b"=" + os.urandom(8).hex().encode()
        mark = {MARK: self._mark.partition(b"=")[2]}
        self._env = {b"PATH": SEARCH_PATH, b"HOME": os.fsencode(cwd), **env, **command.env, **mark}
        self._killed_for: ExitReason | None = None
        self._budget = Budget(command.output_limit, command.output_tail)
        self._ended = False
        self._waits: set[asyncio.Timeout] = set()
        self._pid = 0
        self.input = _Input()

    def signal(self, number: int) -> None:
        """Signals the command's process group while its first process lives."""
        if self._pid and not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[_Execution]:
        """Runs the command for as long as the block lasts; the events end with `Exited`."""
        queue: asyncio.Queue[Event] = asyncio.Queue(EVENTS_AHEAD)
        task = asyncio.create_task(self._run(queue))
        try:
            yield _Execution(self, queue, task)
        finally:
            self.kill_tree()
            task.cancel()
            try:
                await asyncio.wait([task])
            finally:
                self.input.close()

    async def _run(self, queue: asyncio.Queue[Event]) -> None:
        begin = time.monotonic()
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            process = self._start()
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError | NotADirectoryError) else 126
            name = self._command.argv[0].decode(errors="replace")
            await queue.put(
                Exited(ExitReason.NOT_STARTED, exit_code=code, detail=f"{name}: {error.strerror}")
            )
            return
        finally:
            self.input.decided.set()
        assert process.stdout is not None
        assert process.stderr is not None
        unread: list[IO[bytes]] = [process.stdout, process.stderr]
        try:
            await queue.put(Started())
            async with _reading(unread) as stdout, _reading(unread) as stderr:
                await self._communicate(process, queue, stdout, stderr)
        finally:
            self._kill_first(process)
            for pipe in unread:
                pipe.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
        await queue.put(self._exited(process.returncode, time.monotonic() - begin, spent))

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._start_with_pipe() if self._command.interactive else self._start_with_file()
        self._pid = process.pid
        return process

    def _start_with_pipe(self) -> subprocess.Popen[bytes]:
        source, target = os.pipe()
        try:
            process = self._open(source)
        except OSError:
            os.close(target)
            raise
        finally:
            os.close(source)
        os.set_blocking(target, False)
        self.input.fd = target
        return process

    def _start_with_file(self) -> subprocess.Popen[bytes]:
        # A file for standard input: nobody has to feed it while output is read.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(self._command.stdin)
            stdin.seek(0)
            return self._open(stdin)

    def _open(self, stdin: int | IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command.argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._cwd,
            env=self._env,
            start_new_session=True,
        )

    @staticmethod
    def _kill_first(process: subprocess.Popen[bytes]) -> None:
        """Ends the command's first process if it lives, and reaps it."""
        process.kill()
        process.wait()

    async def _communicate(
        self,
        process: subprocess.Popen[bytes],
        queue: asyncio.Queue[Event],
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(stdout, Stdout, queue))
            tasks.create_task(self._read(stderr, Stderr, queue))
            try:
                async with asyncio.timeout(self._command.timeout):
                    await ended(process.pid)
            except TimeoutError:
                self._killed_for = self._killed_for or ExitReason.TIMED_OUT
                self.kill_tree()
                await ended(process.pid)
            process.wait()
            self._ended = True
            for wait in self._waits:
                wait.reschedule(asyncio.get_running_loop().time() + OUTPUT_GRACE_SECONDS)

    async def _read(
        self, stream: asyncio.StreamReader, kind: type[Stdout | Stderr], queue: asyncio.Queue[Event]
    ) -> None:
        output = Trimmer(self._budget)
        late = LATE_BYTES
        while late > 0 and (data := await self._piece(stream)):
            late -= len(data) if self._ended else 0
            offset, kept, too_much = output.take(data)
            if kept:
                await queue.put(kind(kept, offset))
            if too_much and self._killed_for is None:
                self._killed_for = ExitReason.OUTPUT_LIMIT_EXCEEDED
                self.kill_tree()
        offset, tail = output.last()
        if tail:
            await queue.put(kind(tail, offset))

    async def _piece(self, stream: asyncio.StreamReader) -> bytes:
        """The next output, or nothing when it has ended or none comes within the grace after the end."""
        try:
            async with asyncio.timeout(OUTPUT_GRACE_SECONDS if self._ended else None) as wait:
                self._waits.add(wait)
                return await stream.read(PIECE_BYTES)
        except TimeoutError:
            return b""
        finally:
            self._waits.discard(wait)

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
