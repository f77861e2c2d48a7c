"""PID 1 of a sandbox: takes the daemon's connections, starts commands, and reaps every orphan."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket

from sandboxd.guest import named, transfer, wire
from sandboxd.guest.commands import CommandTable
from sandboxd.guest.loop import IN, Loop
from sandboxd.guest.memory import Memory
from sandboxd.guest.peer import Operation, Peer
from sandboxd.guest.spawner import Spawner

BACKLOG = 512
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
# Before connections are taken again when no descriptor was free for one.
ACCEPT_PAUSE_SECONDS = 0.05


class Guest:
    """Serves one listening socket until `lifeline` ends or a signal asks it to."""

    def __init__(
        self, listener: socket.socket, memory: Memory, *, lifeline: int = -1, oom_score_fd: int = -1
    ) -> None:
        self._loop = Loop()
        self._listener = listener
        self._table = CommandTable(self._loop, Spawner(oom_score_fd=oom_score_fd), memory)
        self._named = named.NamedCommands(self._table)
        self._watch_signals()
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), IN, self._accept)
        if lifeline >= 0:
            self._loop.watch(lifeline, IN, lambda _: self._loop.stop())

    def serve(self) -> None:
        """Returns when the sandbox is to end; its processes end with this one."""
        self._loop.run()

    def _watch_signals(self) -> None:
        self._woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._loop.stop())
        self._loop.watch(self._woken, IN, self._on_signal)

    def _on_signal(self, _mask: int) -> None:
        os.read(self._woken, 4096)
        self._table.reap()

    def _accept(self, _mask: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue
                self._loop.unwatch(self._listener.fileno())
                self._loop.after(ACCEPT_PAUSE_SECONDS, self._accept_again)
                return
            Peer(self._loop, sock, self._begin)

    def _accept_again(self) -> None:
        self._loop.watch(self._listener.fileno(), IN, self._accept)

    def _begin(self, peer: Peer, kind: int, payload: bytes) -> Operation | None:
        if kind == wire.EXEC:
            return self._table.begin(peer, payload)
        if kind == wire.PING:
            peer.send(wire.frame(wire.PING))
            return None
        if kind == wire.WATCH:
            return None
        if kind in named.KINDS:
            return self._named.begin(peer, kind, payload)
        return transfer.begin(peer, kind, payload)


def lock_down() -> None:
    """No new privileges for anything started here, and nobody inside may read or trace this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_NO_NEW_PRIVS, 1), (PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option})")
