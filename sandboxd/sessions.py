"""Interpreters that stay: a bash or a Python whose state outlives each piece of code it is given.

Each piece goes in with a number drawn for it, and the interpreter repeats that number on both its outputs
when the piece has ended: what lies before it is the piece's output. Code that runs out of time is
interrupted as by Ctrl-C, and the interpreter lives on.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import InvalidRequest
from sandboxd.interaction import Interaction
from sandboxd.replies import Cut
from sandboxd.requests import as_bytes
from sandboxd.types import Exited, ExitReason, Stderr, Stdout

MARK = b"\x1e"
# Of each output of a piece of code so much is kept, half at its beginning and half at its end.
KEPT_BYTES = 4 << 20
# How long interrupted code may take to end before its processes are killed, and after that the interpreter.
INTERRUPT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class SessionResult:
    """What became of one piece of code. `wall` is in seconds.

    `exit_code` is the last command's (shell), or 1 after an exception (Python); None when the code ran out
    of time. `stdout_cut` and `stderr_cut` say where more than was kept is missing. `alive` is False when
    the interpreter has ended: by itself, or because it could not be interrupted.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    wall: float
    timed_out: bool = False
    alive: bool = True
    stdout_cut: Cut | None = None
    stderr_cut: Cut | None = None

    @property
    def ok(self) -> bool:
        """True when the code ended by itself without an error."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an interpreter is started, and how it is handed a piece of code.

    `opening` is run first and prints the interpreter's process id. `frame` makes the input that runs code
    and then marks both outputs with a number. Raises InvalidRequest.
    """

    name: str
    argv: tuple[str, ...]
    opening: bytes
    frame: Callable[[bytes, bytes], bytes]


def _shell_frame(number: bytes, code: bytes) -> bytes:
    if b"\0" in code:
        raise InvalidRequest("shell code cannot hold a zero byte")
    return number + b"\0" + code + b"\0"


def _python_frame(number: bytes, code: bytes) -> bytes:
    return number + b" %d\n" % len(code) + code


# Code is read whole, then sourced: no quote in it can end anything, and what it declares is not local. An
# interrupt returns from it, the DEBUG trap from the functions around that; 198 and 199 are the outputs by
# other numbers, for code may redirect 1 and 2 for good.
SHELL_LOOP = r"""
exec 198>&1 199>&2
trap : INT
while IFS= read -r -d '' __number && IFS= read -r -d '' __code; do
    trap 'set -T; trap "return 130 2>/dev/null" DEBUG; return 130' INT
    . /dev/fd/197 197<<<"$__code" </dev/null
    __status=$?
    trap - DEBUG
    set +T
    trap : INT
    printf '\036%s:%d\036' "$__number" "$__status" >&198
    printf '\036%s\036' "$__number" >&199
done
"""
SHELL = Dialect(
    name="shell",
    argv=("bash", "--noprofile", "--norc", "-c", SHELL_LOOP),
    opening=b"echo $$",
    frame=_shell_frame,
)


@functools.cache
def python_dialect() -> Dialect:
    """Read when it is first wanted: most programs that import the client open no Python."""
    return Dialect(
        name="Python",
        argv=("python3", "-u", "-c", Path(__file__).with_name("python_session.py").read_text()),
        opening=b"print(__import__('os').getpid())",
        frame=_python_frame,
    )


KILL_CHILDREN = """
for stat in /proc/[0-9]*/stat; do
    read -r line <"$stat" 2>/dev/null || continue
    set -- "$1" ${line##*) }
    [ "$3" = "$1" ] && child=${stat#/proc/} && kill -9 "${child%/stat}"
done
"""


class _Kept:
    """What a piece of code printed on one output: all of it, or its beginning and its end."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._dropped = 0
        self._searched = 0

    @property
    def cut(self) -> Cut | None:
        return Cut(KEPT_BYTES // 2, self._dropped) if self._dropped else None

    def add(self, piece: bytes) -> None:
        self.data += piece
        excess = len(self.data) - KEPT_BYTES
        if excess > 0:
            middle = KEPT_BYTES // 2
            del self.data[middle : middle + excess]
            self._dropped += excess
            self._searched = max(0, self._searched - excess)

    def rewind(self) -> None:
        """The next search begins at the beginning."""
        self._searched = 0

    def take(self, mark: bytes) -> bytes | None:
        """Takes off `mark` and what follows it up to the next MARK, which is returned; None without both.

        What was searched in vain is not searched again.
        """
        at = self.data.find(mark, self._searched)
        if at < 0:
            self._searched = max(0, len(self.data) - len(mark) + 1)
            return None
        end = self.data.find(MARK, at + len(mark))
        if end < 0:
            return None
        between = bytes(self.data[at + len(mark) : end])
        del self.data[at : end + 1]
        return between


class Session:
    """One interpreter. Pieces of code run one after the other, in the order of the calls.

    `kill_children` ends the processes that the interpreter, known by its process id, has started.
    """

    def __init__(
        self, running: Interaction, dialect: Dialect, kill_children: Callable[[int], Awaitable[object]]
    ) -> None:
        self._running = running
        self._dialect = dialect
        self._kill_children = kill_children
        self._turn = asyncio.Lock()
        self._stdout, self._stderr = _Kept(), _Kept()
        self._end: Exited | None = None
        self._cut_off = False
        self._pid = 0

    @property
    def alive(self) -> bool:
        """False once the interpreter is known to have ended."""
        return self._end is None

    async def open(self) -> None:
        """Waits until the interpreter takes code. Raises InvalidRequest when the sandbox has none."""
        result = await self._run(self._dialect.opening, None)
        if self._end is not None:
            raise InvalidRequest(f"no {self._dialect.name} can be opened: {self._end.detail or self._end}")
        self._pid = int(result.stdout)

    async def run(self, code: str | bytes, *, timeout: float | None = None) -> SessionResult:
        """Runs a piece of code; after `timeout` seconds it is interrupted, and its output so far returned.

        Code reads an empty input. Raises InvalidRequest when the interpreter has ended, SandboxLost when
        the sandbox died. A call that is cancelled leaves its code to be interrupted by the next.
        """
        async with self._turn:
            if self._end is not None:
                raise InvalidRequest(f"the {self._dialect.name} has ended; open another")
            if self._cut_off:
                await self._interrupt()
            self._cut_off = True
            result = await self._run(as_bytes(code), timeout)
            self._cut_off = False
            return result

    async def _run(self, code: bytes, timeout: float | None) -> SessionResult:
        began = time.monotonic()
        self._stdout, self._stderr = _Kept(), _Kept()
        number = secrets.token_hex(16).encode()
        frame = self._dialect.frame(number, code)
        timed_out = False
        exit_code: int | None
        try:
            async with asyncio.timeout(timeout):
                await self._running.write(frame)
                exit_code = await self._marked(number)
        except TimeoutError:
            timed_out, exit_code = True, None
            await self._interrupt()
            self._strip(number)
        return SessionResult(
            exit_code=exit_code,
            stdout=bytes(self._stdout.data),
            stderr=bytes(self._stderr.data),
            wall=time.monotonic() - began,
            timed_out=timed_out,
            alive=self.alive,
            stdout_cut=self._stdout.cut,
            stderr_cut=self._stderr.cut,
        )

    async def _marked(self, number: bytes) -> int:
        """Reads up to both marks and takes them off; returns the exit code in the first."""
        code: bytes | None = None
        marked = False
        while True:
            code = self._stdout.take(MARK + number + b":") if code is None else code
            marked = marked or self._stderr.take(MARK + number) is not None
            if code is not None and marked:
                return int(code)
            if (code_at_end := await self._read()) is not None:
                return code_at_end

    async def _read(self) -> int | None:
        """Takes one event; the exit code once the interpreter has ended."""
        match await anext(self._running):
            case Stdout(data):
                self._stdout.add(data)
            case Stderr(data):
                self._stderr.add(data)
            case Exited() as end:
                self._end = end
                return end.exit_code if end.reason is ExitReason.EXITED else 128 + end.signal
        return None

    async def _interrupt(self) -> None:
        """Ends the code that runs; by force what does not end by itself."""
        number = secrets.token_hex(16).encode()
        await self._running.signal(signal.SIGINT)
        await self._running.write(self._dialect.frame(number, b""))
        if await self._comes_back(number):
            return
        await self._kill_children(self._pid)
        if await self._comes_back(number):
            return
        await self._running.signal(signal.SIGKILL)
        while self._end is None:
            await self._read()

    async def _comes_back(self, number: bytes) -> bool:
        try:
            async with asyncio.timeout(INTERRUPT_SECONDS):
                await self._marked(number)
        except TimeoutError:
            return False
        return True

    def _strip(self, number: bytes) -> None:
        """Takes off the marks of code that ended just as it was interrupted."""
        self._stdout.rewind()
        self._stdout.take(MARK + number + b":")
        self._stderr.rewind()
        self._stderr.take(MARK + number)
