"""A way into a container whose guest cannot be reached: the Engine's exec API and a POSIX shell.

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
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager

import docker.errors

from sandboxd.backends import command_users
from sandboxd.backends.docker_files import NEEDS_GUEST, ExecFiles, text
from sandboxd.backends.engine import PING_PAUSE_SECONDS, Engine, EngineRefused
from sandboxd.backends.engine_exec import STDERR, STDOUT, EngineExec
from sandboxd.errors import BackendUnavailable, InvalidRequest, Phase, SandboxLost
from sandboxd.guest.output import Budget, Trimmer
from sandboxd.types import (
    Command,
    CommandInfo,
    Event,
    Exited,
    ExitReason,
    Started,
    Stderr,
    Stdout,
    Template,
)

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


class ExecConnection:
    """A connection through the Engine alone; `sandbox_id` is only for messages."""

    def __init__(self, engine: Engine, container: str, sandbox_id: str, template: Template) -> None:
        self._engine = engine
        self._container = container
        self._sandbox_id = sandbox_id
        self._template = template
        self.memory_limit = template.limits.memory_bytes
        self.commands = NoCommands()

    @property
    def files(self) -> ExecFiles:
        """As `GuestConnection.files`."""
        return ExecFiles(self.start)

    @contextlib.asynccontextmanager
    async def exec(self, command: Command) -> AsyncIterator[_Run]:
        """See `Connection`. Raises InvalidRequest for a terminal, a named command, and what is not UTF-8."""
        command_users.check(command, self._template)
        if command.terminal is not None:
            raise InvalidRequest(f"a terminal {NEEDS_GUEST}", phase=Phase.EXEC)
        if command.id and not command.resumable:
            raise NoCommands.refusal(command.id)
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

    async def wait_lost(self) -> str:
        """Returns when the Engine reports the container's end; an Engine that is away is waited for."""
        while True:
            try:
                return await self._engine.wait_ended(self._container)
            except BackendUnavailable:
                # Not at once: one that answers pings may go on refusing this.
                await asyncio.sleep(PING_PAUSE_SECONDS)
                await self._engine.answers()

    async def close(self) -> None:
        """Nothing is held between commands."""

    async def start(
        self, argv: list[str], *, env: list[str] | None = None, cwd: str | None = None
    ) -> EngineExec:
        """Starts a program in the container. Raises SandboxLost when that does not run."""
        workdir = cwd or text(self._template.cwd)
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
        return EngineExec(self._engine, self._container, created["Id"], stream)

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
        argv = ["sh", "-c", START, "sh", *map(text, command.argv)]
        pairs = [f"{text(key)}={text(value)}" for key, value in env.items()]
        cwd = self._template.cwd
        if command.cwd is not None:
            cwd = os.path.join(cwd, command.cwd)  # noqa: PTH118 - bytes
        return argv, pairs, text(cwd)


class NoCommands:
    """Implements `base.Commands` where no guest keeps what commands print: by refusing all but the list."""

    @staticmethod
    def refusal(command_id: str) -> InvalidRequest:
        """Why nothing can be named here."""
        return InvalidRequest(f"command_id {command_id!r}: a named command {NEEDS_GUEST}", phase=Phase.EXEC)

    def attach(self, command_id: str, **_offsets: int) -> AbstractAsyncContextManager[AsyncIterable[Event]]:
        """Raises InvalidRequest."""
        raise self.refusal(command_id)

    async def signal(self, command_id: str, _number: int) -> None:
        """Raises InvalidRequest."""
        raise self.refusal(command_id)

    async def known(self) -> list[CommandInfo]:
        """There are none."""
        return []

    async def forget(self, command_id: str) -> None:
        """Raises InvalidRequest."""
        raise self.refusal(command_id)


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
        raise InvalidRequest(f"a signal {NEEDS_GUEST}", phase=Phase.EXEC)

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
            detail = f"memory limit {self._connection.memory_limit} bytes"
            return Exited(ExitReason.OOM_KILLED, exit_code=code, signal=9, wall=wall, detail=detail)
        return Exited(ExitReason.EXITED, exit_code=code, wall=wall)

    async def _not_started(self, refusal: bytes) -> Exited:
        await self._connection.ping()
        name = self._command.argv[0].decode(errors="replace")
        if refusal == b"N":
            return Exited(ExitReason.NOT_STARTED, exit_code=127, detail=f"{name}: not found on PATH")
        return Exited(ExitReason.NOT_STARTED, exit_code=126, detail=refusal.decode(errors="replace").strip())

    def _end_for(self, reason: ExitReason) -> None:
        if self._killed_for is None and not self._over:
            self._killed_for = reason
            self._kill = asyncio.create_task(self._kill_tree())
            self._tasks += (self._kill, asyncio.create_task(self._escalate(self._kill)))

    async def _kill_tree(self) -> None:
        with contextlib.suppress(SandboxLost, BackendUnavailable):
            await self._connection.kill(self._mark)

    async def _escalate(self, kill: asyncio.Task[None]) -> None:
        await asyncio.wait([kill])
        # What escaped holds the stream open; then only the sandbox's end is sure.
        await asyncio.sleep(KILL_PATIENCE_SECONDS)
        try:
            await self._connection.kill_sandbox()
        except BackendUnavailable:
            # Nobody ends it now: its caller hears that, instead of waiting for an Engine that may be hung.
            self._execution.close()

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
