"""Starts a command's first process, joined to this one by pipes or a terminal and by nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import termios

from sandboxd.guest import wire
from sandboxd.guest.tree import Tagger

DEFAULT_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


class Ends:
    """What connects a command: its three descriptors, by pipes or a terminal, and this side's ends of them.

    `actions` give the child its descriptors; `theirs` are closed once it has them. `stdin` is -1 where
    nothing is to be written; `outputs` are read. Raises OSError, with nothing left open.
    """

    def __init__(self, request: wire.ExecRequest, null: int) -> None:
        self.actions: list[tuple[int, ...] | tuple[int, int, bytes, int, int]] = []
        self.theirs: list[int] = []
        self.outputs: list[tuple[int, int]] = []
        self.stdin = -1
        self.terminal = -1
        try:
            if request.terminal[0]:
                self._open_terminal(request)
            else:
                self._open_pipes(request.has_stdin, null)
        except BaseException:
            self.close()
            raise

    def _open_pipes(self, has_stdin: bool, null: int) -> None:
        source = null
        if has_stdin:
            source, self.stdin = os.pipe()
            self.theirs.append(source)
        self.actions.append((os.POSIX_SPAWN_DUP2, source, 0))
        for number, kind in ((1, wire.STDOUT), (2, wire.STDERR)):
            mine, theirs = os.pipe()
            self.outputs.append((kind, mine))
            self.theirs.append(theirs)
            self.actions.append((os.POSIX_SPAWN_DUP2, theirs, number))

    def _open_terminal(self, request: wire.ExecRequest) -> None:
        self.terminal, slave = os.openpty()
        self.theirs.append(slave)
        self.outputs.append((wire.STDOUT, self.terminal))
        resize(self.terminal, *request.terminal)
        # Its own number, for input and output are watched apart.
        self.stdin = os.dup(self.terminal)
        # Opened anew, not handed down: opening it is what makes it the new session's terminal.
        self.actions.append((os.POSIX_SPAWN_OPEN, 0, os.ttyname(slave).encode(), os.O_RDWR, 0))
        self.actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]

    def spawned(self) -> None:
        """The child has its ends."""
        for fd in self.theirs:
            os.close(fd)
        self.theirs.clear()

    def close(self) -> None:
        """There is no child."""
        self.spawned()
        for fd in (self.stdin, *(fd for _, fd in self.outputs)):
            if fd >= 0:
                os.close(fd)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Spawner:
    """Starts programs with nothing of this process but three descriptors."""

    def __init__(self, *, oom_score_fd: int = -1) -> None:
        self._tagger = Tagger()
        self._oom_score_fd = oom_score_fd
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def connect(self, request: wire.ExecRequest) -> Ends:
        """Pipes or a terminal for a command. Raises OSError."""
        return Ends(request, self._null)

    def spawn(self, request: wire.ExecRequest, ends: Ends) -> tuple[int, int]:
        """Returns the child's pid and tag. Raises OSError."""
        env = dict(request.env)
        self._oom_score(b"500")
        tag = self._tagger.take()
        try:
            os.chdir(request.cwd)
            pid = self._posix_spawn(request.argv, env, ends)
        finally:
            os.chdir("/")
            self._tagger.drop()
            self._oom_score(b"0")
        return pid, tag

    def _posix_spawn(self, argv: list[bytes], env: dict[bytes, bytes], ends: Ends) -> int:
        path = search(argv[0], env.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin"))
        return os.posix_spawn(
            path,
            argv,
            env,
            file_actions=ends.actions,
            setsid=True,
            setsigmask=[],
            setsigdef=DEFAULT_SIGNALS,
        )

    def _oom_score(self, score: bytes) -> None:
        """So that a full memory limit takes the command and not PID 1, which is the sandbox."""
        if self._oom_score_fd >= 0:
            os.pwrite(self._oom_score_fd, score, 0)


def search(name: bytes, path: bytes) -> bytes:
    """The program that a shell would run for this name. Raises FileNotFoundError."""
    if b"/" in name:
        return name
    for directory in path.split(b":"):
        candidate = os.path.join(directory or b".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "not found on PATH")
