"""A way into a container whose image has no Python for the guest: the Engine's exec API and a POSIX shell.

Weaker than the guest, and the sandbox's capabilities say so: an exec costs the Engine's 60 to 200 ms; the
Engine reports a signal as exit code 128 + n; CPU time is unknown (0); argv, environment and paths must be
UTF-8; a process that clears its environment escapes the kill of its command (not of its sandbox).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import docker.errors

from sandboxd.backends.engine import Engine, EngineRefused, EngineStream
from sandboxd.errors import BackendUnavailable, FileFailed, FileNotFound, InvalidRequest, Phase, SandboxLost
from sandboxd.guest.output import Budget, Trimmer
from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout, Template

STDOUT, STDERR = 1, 2
# Every process of a command inherits this variable: how a kill finds those that left its group.
MARK = "SANDBOXD_COMMAND"
# Tells a program that was started, by one byte ahead of its output, from one that cannot be.
START = 'command -v "$1" >/dev/null 2>&1 || { printf N; exit 127; }; printf S; exec "$@"'
# Passes until one finds nobody; a zombie's environment is empty, so it is not found again.
KILL = (
    "while :; do none=1; for p in /proc/[0-9]*; do"
    " if tr '\\0' '\\n' <$p/environ 2>/dev/null | grep -qxF \"$1\"; then"
    " kill -9 ${p#/proc/} 2>/dev/null && none=0; fi; done; [ $none = 0 ] || break; done"
)
# The Engine itself holds a stream open for 2 s when a background child does.
KILL_PATIENCE_SECONDS = 5.0
IS_MISSING, IS_DIRECTORY, IS_REFUSED = 44, 45, 46
STAGE = '[ ! -d "$1" ] || exit 45; d=$(dirname "$1"); mkdir -p "$d" && cat >"$d/$2"'
COMMIT = 'd=$(dirname "$1"); chmod "$3" "$d/$2" && mv -f "$d/$2" "$1"'
DISCARD = 'rm -f "$(dirname "$1")/$2"'
FETCH = (
    '[ -e "$1" ] || exit 44; [ ! -d "$1" ] || exit 45; [ -r "$1" ] || exit 46;'
    ' if [ "$3" = all ]; then tail -c "+$2" "$1"; else tail -c "+$2" "$1" | head -c "$3"; fi'
)


class ExecConnection:
    """A connection through the Engine alone; `sandbox_id` is only for messages."""

    def __init__(self, engine: Engine, container: str, sandbox_id: str, template: Template) -> None:
        self._engine = engine
        self._container = container
        self._sandbox_id = sandbox_id
        self._template = template

    @contextlib.asynccontextmanager
    async def exec(self, command: Command) -> AsyncIterator[_Run]:
        """See `Connection`. Raises InvalidRequest for a terminal, and for what is not UTF-8."""
        if command.terminal is not None:
            raise InvalidRequest("a terminal needs an image with python3", phase=Phase.EXEC)
        run = _Run(self, command)
        await run.start()
        try:
            yield run
        finally:
            await run.end()

    async def ping(self) -> None:
        """Returns when the Engine says that the container runs."""
        if (state := await self._engine.ended(self._container)) is not None:
            raise SandboxLost(f"sandbox {self._sandbox_id} is gone: {state}")

    async def write_file(self, path: bytes, data: AsyncIterator[bytes], mode: int) -> int:
        """See `Connection`. Two steps, so that a source that fails half-way replaces nothing."""
        name = _text(path)
        partial = f".{secrets.token_hex(8)}.partial"
        size = 0
        stage = await self.start(["sh", "-c", STAGE, "sh", name, partial])
        try:
            async for piece in data:
                size += len(piece)
                await stage.feed(piece)
            await self._file_step(stage, name)
            commit = ["sh", "-c", COMMIT, "sh", name, partial, f"{mode & 0o7777:o}"]
            await self._file_step(await self.start(commit), name)
        except BaseException:
            stage.close()
            await (await self.start(["sh", "-c", DISCARD, "sh", name, partial])).finish()
            raise
        return size

    async def _file_step(self, step: Execution, path: str) -> None:
        output = await step.finish()
        code = await step.exit_code()
        if code:
            raise _file_error(code, path, output.decode(errors="replace").strip())

    async def read_file(
        self, path: bytes, *, offset: int = 0, limit: int | None = None
    ) -> AsyncIterator[bytes]:
        """See `Connection`."""
        name = _text(path)
        size = "all" if limit is None else str(limit)
        fetch = await self.start(["sh", "-c", FETCH, "sh", name, str(offset + 1), size])
        errors = b""
        try:
            async for kind, piece in fetch.frames():
                if kind == STDOUT:
                    yield piece
                else:
                    errors += piece
            code = await fetch.exit_code()
            if code:
                raise _file_error(code, name, errors.decode(errors="replace").strip())
        finally:
            fetch.close()

    async def wait_lost(self) -> str:
        """Returns when the Engine reports the container's end."""
        try:
            return await self._engine.wait_ended(self._container)
        except BackendUnavailable as error:
            return error.message

    async def close(self) -> None:
        """Nothing is held between commands."""

    async def start(
        self, argv: list[str], *, env: list[str] | None = None, cwd: str | None = None
    ) -> Execution:
        """Starts a program in the container. Raises SandboxLost when that does not run."""
        workdir = cwd or _text(self._template.cwd)
        try:
            created = await self._engine.call(
                lambda api: api.exec_create(
                    self._container, argv, stdin=True, environment=env or [], workdir=workdir
                )
            )
            stream = await self._engine.stream(
                f"/exec/{created['Id']}/start", {"Detach": False, "Tty": False}
            )
        except (docker.errors.APIError, EngineRefused) as error:
            state = await self._engine.ended(self._container) or str(error)
            raise SandboxLost(f"sandbox {self._sandbox_id} is gone: {state}") from error
        return Execution(self._engine, self._container, created["Id"], stream)

    async def kill(self, mark: str) -> None:
        """Kills every process that carries the mark."""
        killer = await self.start(["sh", "-c", KILL, "sh", f"{MARK}={mark}"], cwd="/")
        await killer.finish()

    async def kill_sandbox(self) -> None:
        """Kills the whole container: the way out when a command cannot be ended alone."""
        with contextlib.suppress(docker.errors.APIError):
            await self._engine.call(lambda api: api.kill(self._container))

    async def ran_out_of_memory(self) -> bool:
        """True when the kernel killed for this container's limit. Raises SandboxLost when it is gone."""
        await self.ping()
        found = await self._engine.call(lambda api: api.inspect_container(self._container))
        return bool(found["State"].get("OOMKilled"))

    def command(self, command: Command, mark: str) -> tuple[list[str], list[str], str]:
        """The command as the Engine takes it: argv, environment, working directory."""
        env = {b"HOME": self._template.cwd, **self._template.env, **command.env, MARK.encode(): mark.encode()}
        argv = ["sh", "-c", START, "sh", *map(_text, command.argv)]
        pairs = [f"{_text(key)}={_text(value)}" for key, value in env.items()]
        cwd = self._template.cwd
        if command.cwd is not None:
            cwd = os.path.join(cwd, command.cwd)  # noqa: PTH118 - bytes
        return argv, pairs, _text(cwd)


class Execution:
    """One exec of the Engine: a raw stream and, in the end, an exit code."""

    def __init__(self, engine: Engine, container: str, exec_id: str, stream: EngineStream) -> None:
        self._engine = engine
        self._container = container
        self._exec_id = exec_id
        self._stream = stream

    async def feed(self, data: bytes) -> None:
        """Writes to its standard input, waiting for the program to take it."""
        self._stream.writer.write(data)
        await self._stream.writer.drain()

    def end_input(self) -> None:
        """Its standard input ends."""
        self._stream.writer.write_eof()

    def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Its output until it ends."""
        return self._stream.frames()

    async def finish(self) -> bytes:
        """Ends its input and returns all it printed; for programs that print little."""
        try:
            self.end_input()
            return b"".join([piece async for _, piece in self._stream.frames()])
        finally:
            self.close()

    def close(self) -> None:
        """Drops the connection; the Engine then ends the program's input."""
        self._stream.close()

    async def exit_code(self) -> int:
        """Waits for the end; a program that closed its output may still run."""
        found = await self._inspect()
        if not found["Running"]:
            return int(found["ExitCode"] or 0)
        filters = quote(f'{{"container":["{self._container}"],"event":["exec_die"]}}')
        async with self._engine.lines("GET", f"/events?filters={filters}") as events:
            found = await self._inspect()  # It may have ended before the events were listened to.
            if not found["Running"]:
                return int(found["ExitCode"] or 0)
            async for event in events:
                attributes = event.get("Actor", {}).get("Attributes", {})
                if attributes.get("execID") == self._exec_id:
                    return int(attributes.get("exitCode", 0))
        raise SandboxLost("the Docker Engine went away while a command ran")

    async def _inspect(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await self._engine.call(lambda api: api.exec_inspect(self._exec_id))
        except docker.errors.APIError as error:
            raise SandboxLost(f"the container is gone: {error.explanation}") from error
        return found


class _Run:
    """One command of a caller: its events, its timeout and limits, and the end of all it started."""

    def __init__(self, connection: ExecConnection, command: Command) -> None:
        self._connection = connection
        self._command = command
        self._mark = secrets.token_hex(8)
        self._killed_for: ExitReason | None = None
        self._kill: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        budget = Budget(command.output_limit, command.output_tail)
        self._outputs = {STDOUT: Trimmer(budget), STDERR: Trimmer(budget)}
        # Only standard output begins with the byte that tells a start.
        self._mark_due = True
        self._over = False
        self._events = self._tell_events()

    async def start(self) -> None:
        """Raises SandboxLost, InvalidRequest."""
        self._begin = time.monotonic()
        argv, env, cwd = self._connection.command(self._command, self._mark)
        self._execution = await self._connection.start(argv, env=env, cwd=cwd)
        if not self._command.interactive:
            self._tasks.append(asyncio.create_task(self._feed()))
        if self._command.timeout is not None:
            self._tasks.append(asyncio.create_task(self._watch(self._command.timeout)))

    async def write(self, data: bytes) -> None:
        """See `base.Execution`."""
        # After the end nobody takes it; before, the program may have closed its input.
        if not self._over:
            with contextlib.suppress(ConnectionError):
                await self._execution.feed(data)

    async def end_input(self) -> None:
        """See `base.Execution`."""
        with contextlib.suppress(ConnectionError):
            self._execution.end_input()

    async def signal(self, _number: int) -> None:
        """The Engine has no way to signal one command."""
        raise InvalidRequest("signals need an image with python3", phase=Phase.EXEC)

    async def resize(self, rows: int, columns: int) -> None:
        """There is no terminal."""

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def _tell_events(self) -> AsyncIterator[Event]:
        """`Started`, the output, `Exited`."""
        refusal = b""
        started = False
        async for kind, piece in self._execution.frames():
            if not started and kind == STDOUT and not piece.startswith(b"S"):
                refusal += piece
                continue
            if not started:
                started = True
                yield Started()
            for event in self._cut(kind, piece):
                yield event
        for event in self._last():
            yield event
        code = await self._execution.exit_code()
        if self._kill is not None:
            await self._kill  # The stream may end before the last process that holds none of it.
        self._over = True
        yield await self._exited(code) if started else await self._not_started(refusal)

    def _cut(self, kind: int, piece: bytes) -> list[Event]:
        """The part of a piece within the output limit; past it the command is killed."""
        if kind == STDOUT and self._mark_due:
            self._mark_due = False
            piece = piece[1:]
        offset, kept, too_much = self._outputs[kind].take(piece)
        if too_much:
            self._end_for(ExitReason.OUTPUT_LIMIT_EXCEEDED)
        return [_output(kind, kept, offset)] if kept else []

    def _last(self) -> list[Event]:
        """What was kept of the output past the limit."""
        tails = [(kind, *output.last()) for kind, output in self._outputs.items()]
        return [_output(kind, tail, offset) for kind, offset, tail in tails if tail]

    async def _exited(self, code: int) -> Exited:
        wall = time.monotonic() - self._begin
        if self._killed_for is not None:
            return Exited(self._killed_for, signal=9, wall=wall)
        if code == 128 + 9 and await self._connection.ran_out_of_memory():
            return Exited(ExitReason.OOM_KILLED, exit_code=code, signal=9, wall=wall)
        return Exited(ExitReason.EXITED, exit_code=code, wall=wall)

    async def _not_started(self, refusal: bytes) -> Exited:
        await self._connection.ping()
        name = os.fsdecode(self._command.argv[0])
        if refusal == b"N":
            return Exited(ExitReason.NOT_STARTED, exit_code=127, detail=f"{name}: not found on PATH")
        return Exited(ExitReason.NOT_STARTED, exit_code=126, detail=refusal.decode(errors="replace").strip())

    def _end_for(self, reason: ExitReason) -> None:
        if self._killed_for is None and not self._over:
            self._killed_for = reason
            self._kill = asyncio.create_task(self._kill_tree())
            self._tasks += (self._kill, asyncio.create_task(self._escalate(self._kill)))

    async def _kill_tree(self) -> None:
        with contextlib.suppress(SandboxLost):
            await self._connection.kill(self._mark)

    async def _escalate(self, kill: asyncio.Task[None]) -> None:
        await asyncio.wait([kill])
        # What escaped holds the stream open; then only the sandbox's end is sure.
        await asyncio.sleep(KILL_PATIENCE_SECONDS)
        await self._connection.kill_sandbox()

    async def _watch(self, timeout: float) -> None:
        await asyncio.sleep(timeout)
        self._end_for(ExitReason.TIMED_OUT)

    async def _feed(self) -> None:
        await self.write(self._command.stdin)
        await self.end_input()

    async def end(self) -> None:
        """Ends what is left of the command; called once, however the caller left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # First: while output that nobody reads is stuck in it, the Engine tells no other program's end.
        self._execution.close()
        if not self._over:
            await self._kill_tree()


def _output(kind: int, data: bytes, offset: int) -> Event:
    return Stdout(data, offset) if kind == STDOUT else Stderr(data, offset)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{value!r} is not UTF-8: the Engine's exec API takes text only; use an image with python3"
        ) from error


def _file_error(code: int, path: str, detail: str) -> Exception:
    if code == IS_MISSING:
        return FileNotFound(f"{path}: No such file or directory")
    if code == IS_DIRECTORY:
        return FileFailed(f"{path}: Is a directory")
    if code == IS_REFUSED:
        return FileFailed(f"{path}: Permission denied")
    return FileFailed(f"{path}: {detail or f'the shell ended with status {code}'}")
