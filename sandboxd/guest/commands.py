"""One command: its process, its two streams and its end, told to an outlet in the order they happened."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable

from sandboxd.guest import wire
from sandboxd.guest.loop import GONE, IN, OUT, Loop, Timer
from sandboxd.guest.memory import Memory
from sandboxd.guest.outlet import Direct, Outlet
from sandboxd.guest.output import Budget, Trimmer
from sandboxd.guest.peer import Operation, Peer
from sandboxd.guest.spawner import Ends, Spawner, resize
from sandboxd.guest.tree import kill_tree

# A background child that keeps the output open delays the end by no more than this.
GRACE_SECONDS = 0.2
# Between two looks at a tree that does not die at once, and how long to keep looking.
KILL_PAUSE_SECONDS = 0.002
KILL_PATIENCE_SECONDS = 5.0
# Standard input that waits for its command; past it the daemon waits.
STDIN_AHEAD = 256 << 10
# What a terminal's user types to end the input.
END_OF_FILE = b"\x04"


class Stream:
    """One of a command's two outputs, as far as it was read."""

    __slots__ = ("fd", "kind", "last_bytes", "output")

    def __init__(self, kind: int, fd: int, budget: Budget) -> None:
        self.kind = kind
        self.fd = fd
        self.output = Trimmer(budget)
        # After the grace: how much more is read of what a background child keeps open.
        self.last_bytes: int | None = None


class CommandTable:
    """The commands that run, by the pid of their first process."""

    def __init__(self, loop: Loop, spawner: Spawner, memory: Memory) -> None:
        self.loop = loop
        self.spawner = spawner
        self.memory = memory
        self._running: dict[int, Running] = {}

    def begin(self, peer: Peer, payload: bytes) -> Operation:
        """The command of one connection, which ends with it. Raises wire.Malformed."""
        return self.start(wire.ExecRequest.unpack(payload), Direct(peer)) or Operation()

    def start(self, request: wire.ExecRequest, outlet: Outlet) -> Running | None:
        """Starts a command, or tells `outlet` why it was not. Raises wire.Malformed."""
        try:
            ends = self.spawner.connect(request)
        except OSError as error:
            outlet.ended(_not_started(request, error))
            return None
        try:
            pid, tag = self.spawner.spawn(request, ends)
        except OSError as error:
            ends.close()
            outlet.ended(_not_started(request, error))
            return None
        except ValueError as error:
            ends.close()
            raise wire.Malformed(str(error)) from error
        ends.spawned()
        running = Running(self, outlet, request, pid, tag)
        self._running[pid] = running
        running.connect(ends)
        return running

    def reap(self) -> None:
        """Takes every ended child: commands, and the orphans that became PID 1's."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            running = self._running.pop(pid, None)
            if running is not None:
                running.ended(status, usage.ru_utime + usage.ru_stime)


def _not_started(request: wire.ExecRequest, error: OSError) -> bytes:
    code = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
    subject = request.argv[0] if os.path.isdir(request.cwd) else b"working directory " + request.cwd
    detail = subject + b": " + (error.strerror or "failed").encode()
    return _exited("NOT_STARTED", code=code, detail=detail)


def _exited(
    reason: str, *, code: int = 0, number: int = 0, wall: float = 0.0, cpu: float = 0.0, detail: bytes = b""
) -> bytes:
    fields = wire.EXITED_FIELDS.pack(wire.REASONS.index(reason), code, number, wall, cpu)
    return wire.frame(wire.EXITED, fields, detail)


class Running(Operation):
    """A command that was started; the operation of its connection, unless it is a named one."""

    def __init__(
        self, table: CommandTable, outlet: Outlet, request: wire.ExecRequest, pid: int, tag: int
    ) -> None:
        self._table = table
        self._loop = table.loop
        self._outlet = outlet
        self._pid = pid
        self._tag = tag
        limit = request.output_limit if request.output_limit >= 0 else None
        self._budget = Budget(limit, request.output_tail)
        self._streams: list[Stream] = []
        self._stdin = -1
        self._terminal = -1
        self._input = bytearray()
        self._input_ended = not request.has_stdin
        self._status: int | None = None
        self._cpu = 0.0
        self._wall = 0.0
        self._begin = time.monotonic()
        self._oom_before = table.memory.kills()
        self._killed_for = ""
        self._kill_by: float | None = None
        self._tree_dead = True
        self._detail = b""
        self._over = False
        self._timers: list[Timer] = []
        if request.timeout >= 0:
            self._timers.append(self._loop.after(request.timeout, lambda: self.kill("TIMED_OUT")))

    def connect(self, ends: Ends) -> None:
        """Tells that the command runs, and watches its ends."""
        self._outlet.started(wire.frame(wire.STARTED, struct.pack("!I", self._pid)))
        self._streams = [Stream(kind, fd, self._budget) for kind, fd in ends.outputs]
        for stream in self._streams:
            os.set_blocking(stream.fd, False)
        self._watch_streams()
        self._stdin = ends.stdin
        self._terminal = ends.terminal
        if self._stdin >= 0:
            os.set_blocking(self._stdin, False)
        if self._terminal >= 0 and self._input_ended:
            self._input += END_OF_FILE
            self._feed(OUT)

    # -- what the daemon sends

    def received(self, kind: int, payload: bytes) -> None:
        if kind == wire.STDIN:
            if not payload and not self._input_ended and self._terminal >= 0:
                self._input += END_OF_FILE
            self._input_ended = self._input_ended or not payload
            self._input += payload
            self._feed(OUT)
        elif kind == wire.SIGNAL and len(payload) == wire.SIGNAL_FIELDS.size:
            self._signal(*wire.SIGNAL_FIELDS.unpack(payload))
        elif kind == wire.RESIZE and len(payload) == wire.SIZE_FIELDS.size:
            if self._terminal >= 0:
                resize(self._terminal, *wire.SIZE_FIELDS.unpack(payload))
        else:
            raise wire.Malformed(f"frame {kind} may not follow an exec request")

    def _signal(self, number: int) -> None:
        """To the group in the terminal's foreground, or the command's own; none once it was reaped."""
        if self._status is not None:
            return
        try:
            foreground = os.tcgetpgrp(self._terminal) if self._terminal >= 0 else 0
            # 0 would be this process's own group.
            os.killpg(foreground or self._pid, number)
        except (ProcessLookupError, PermissionError):
            pass
        except OSError as error:
            raise wire.Malformed(str(error)) from error

    def _feed(self, _mask: int) -> None:
        """Writes what the command takes; an input that nobody reads is thrown away."""
        if self._stdin >= 0 and self._input:
            try:
                del self._input[: os.write(self._stdin, self._input)]
            except BlockingIOError:
                pass
            except OSError:
                self._close_stdin()
        if self._stdin < 0:
            del self._input[:]
        elif not self._input and self._input_ended:
            self._close_stdin()
        elif self._input:
            self._loop.watch(self._stdin, OUT, self._feed)
        else:
            self._loop.unwatch(self._stdin)
        self._outlet.hold_input(len(self._input) >= STDIN_AHEAD)

    def _close_stdin(self) -> None:
        self._loop.unwatch(self._stdin)
        os.close(self._stdin)
        self._stdin = -1

    def drained(self) -> None:
        """The daemon took the last piece: read on."""
        self._watch_streams()
        self._finish_if_done()

    def closed(self) -> None:
        """Nobody wants it any more: the command and all that it started must end."""
        if not self._over:
            self._discard_output()
            self.kill("SIGNALED")

    # -- output

    def _watch_streams(self) -> None:
        for stream in self._streams:
            # A mask of 0 would still report hang-ups, in a tight loop: the watch is taken off instead.
            if self._outlet.congested:
                self._loop.unwatch(stream.fd)
            else:
                self._loop.watch(stream.fd, IN, self._reader(stream))

    def _reader(self, stream: Stream) -> Callable[[int], None]:
        return lambda mask: self._read(stream) if mask & (IN | GONE) else None

    def _read(self, stream: Stream) -> None:
        if stream not in self._streams or self._outlet.congested:
            return
        size = wire.PIECE if stream.last_bytes is None else min(wire.PIECE, stream.last_bytes)
        try:
            data = os.read(stream.fd, size) if size else b""
        except BlockingIOError:
            return
        except OSError:  # A terminal that nobody has open any more.
            data = b""
        if stream.last_bytes is not None:
            stream.last_bytes -= len(data)
        if data:
            self._emit(stream, data)
        if not data or stream.last_bytes == 0:
            self._send_tail(stream)
            self._close_stream(stream)
        if self._outlet.congested:
            self._watch_streams()
        self._finish_if_done()

    def _emit(self, stream: Stream, data: bytes) -> None:
        offset, kept, too_much = stream.output.take(data)
        self._send(stream, offset, kept)
        if too_much:
            # The kill before the close, or the command would die of SIGPIPE first.
            self.kill("OUTPUT_LIMIT_EXCEEDED")
            self._discard_output()

    def _send_tail(self, stream: Stream) -> None:
        """What was kept of the output past the limit, now that no more comes."""
        offset, tail = stream.output.last()
        for start in range(0, len(tail), wire.PIECE):
            self._send(stream, offset + start, tail[start : start + wire.PIECE])

    def _send(self, stream: Stream, offset: int, data: bytes) -> None:
        if data:
            self._outlet.output(stream.kind, offset, data)

    def _close_stream(self, stream: Stream) -> None:
        if stream not in self._streams:
            return
        self._loop.unwatch(stream.fd)
        os.close(stream.fd)
        self._streams.remove(stream)
        if stream.fd == self._terminal:
            self._terminal = -1

    def _discard_output(self) -> None:
        for stream in list(self._streams):
            self._close_stream(stream)

    # -- the end

    def ended(self, status: int, cpu: float) -> None:
        """The first process was reaped; what it wrote before may still be in the pipes."""
        self._status = status
        self._cpu = cpu
        self._wall = time.monotonic() - self._begin
        if self._kill_by is None:
            self._cancel_timers()
            for stream in list(self._streams):
                self._read(stream)
            if self._streams:
                self._timers.append(self._loop.after(GRACE_SECONDS, self._stop_waiting))
        self._finish_if_done()

    def _stop_waiting(self) -> None:
        """The grace is over: what is in the pipes now is the last that is read."""
        for stream in list(self._streams):
            waiting = fcntl.ioctl(stream.fd, termios.FIONREAD, b"\0\0\0\0")
            (stream.last_bytes,) = struct.unpack("i", waiting)
            if not stream.last_bytes:
                self._send_tail(stream)
                self._close_stream(stream)
        self._finish_if_done()

    def kill(self, reason: str) -> None:
        """Ends the whole tree and remembers why."""
        if self._over or self._kill_by is not None:
            return
        self._cancel_timers()
        if self._status is None:
            self._killed_for = reason
        self._kill_by = time.monotonic() + KILL_PATIENCE_SECONDS
        self._tree_dead = False
        self._kill_again()

    def _kill_again(self) -> None:
        root = self._pid if self._status is None else 0
        self._tree_dead = kill_tree(self._tag, root)
        if not self._tree_dead and self._kill_by is not None and time.monotonic() > self._kill_by:
            self._tree_dead = True
            self._detail = b"some of its processes did not die"
        if not self._tree_dead:
            self._timers = [self._loop.after(KILL_PAUSE_SECONDS, self._kill_again)]
        elif self._status is not None or self._streams:
            self._timers = [self._loop.after(GRACE_SECONDS, self._stop_waiting)]
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._over or self._status is None or self._streams or not self._tree_dead:
            return
        self._over = True
        self._cancel_timers()
        if self._stdin >= 0:
            self._close_stdin()
        self._outlet.ended(self._ending(self._status))
        del self._input[:]
        self._outlet.hold_input(False)

    def _ending(self, status: int) -> bytes:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
        reason = self._killed_for or ("SIGNALED" if number else "EXITED")
        # A shell reports its child's SIGKILL as 137.
        killed_by_other = not self._killed_for and signal.SIGKILL in (number, code - 128)
        if killed_by_other and self._table.memory.kills() > self._oom_before:
            reason, self._detail = "OOM_KILLED", self._table.memory.describe()
        return _exited(reason, code=code, number=number, wall=self._wall, cpu=self._cpu, detail=self._detail)

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []
