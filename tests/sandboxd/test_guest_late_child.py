"""A command whose process comes late: here a filter holds its first step, as a host that has no processor to
give would.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxd.guest import wire

from .guest_kit import Raw, Started, listen

CALLS = {"x86_64": (317, 59, 247), "aarch64": (277, 221, 95)}
SECCOMP, EXECVE, WAITID = CALLS.get(platform.machine(), (0, 0, 0))
# Of <linux/seccomp.h>.
RECEIVE, SEND, GO_ON = 0xC0502100, 0xC0182101, 1
NOTE, ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
# waitid's first argument, and what `spawn.c` asks for with WNOHANG.
P_PID, STOPPED_AND_LEFT = 1, 0x2 | 0x1000000
ASKED_OFTEN = 3

# Has each program that is begun, and each wait, told at a socket, and the answer awaited.
TOLD = """
import ctypes, os, socket, struct, sys
seccomp, execve, waitid = map(int, sys.argv[1:4])
code = [
    (0x20, 0, 0, 0), (0x15, 1, 0, execve), (0x15, 0, 1, waitid),
    (0x06, 0, 0, 0x7FC00000), (0x06, 0, 0, 0x7FFF0000),
]
lines = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(lines)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
listener = libc.syscall(seccomp, 1, 8, program)
with socket.socket(socket.AF_UNIX) as told:
    told.connect(sys.argv[4])
    if listener < 0:
        told.sendall(struct.pack("=i", ctypes.get_errno()))
    else:
        socket.send_fds(told, [struct.pack("=i", 0)], [listener])
os.execv(sys.argv[5], sys.argv[5:])
"""


class Holder:
    """Lets every call go on, but of the programs that begin the second, which the guest starts, only once the
    guest has asked often whether it was stopped.
    """

    def __init__(self, listener: int) -> None:
        self._listener = listener
        self._over, self._end = os.pipe()
        self._begun = 0
        self._held: int | None = None
        self.asked = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def end(self) -> None:
        os.close(self._end)
        self._thread.join(20)
        os.close(self._over)
        os.close(self._listener)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._over, 0)
        while all(number == self._listener and event == select.POLLIN for number, event in poll.poll()):
            note = bytearray(NOTE.size)
            with gone_perhaps():
                fcntl.ioctl(self._listener, RECEIVE, note)
                self._noted(*NOTE.unpack(note))

    def _noted(self, number: int, _pid: int, _flags: int, call: int, *rest: int) -> None:
        kind, options = rest[2], rest[5]
        if call == EXECVE:
            self._begun += 1
            if self._begun == 2:
                self._held = number
                return
        elif self._held is not None:
            self.asked += kind == P_PID and options & STOPPED_AND_LEFT == STOPPED_AND_LEFT
        self._let_go(number)
        if self._held is not None and self.asked >= ASKED_OFTEN:
            number, self._held = self._held, None
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        fcntl.ioctl(self._listener, SEND, ANSWER.pack(number, 0, 0, GO_ON))


@contextmanager
def gone_perhaps() -> Iterator[None]:
    """Whoever called may have ended since, or been interrupted, and then calls again."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


@contextmanager
def held(directory: Path) -> Iterator[tuple[Path, Holder]]:
    """A guest, and who holds its first command; skips where the kernel does not tell of system calls."""
    with listen(directory / "told") as told:
        told.settimeout(20)
        words = (SECCOMP, EXECVE, WAITID, directory / "told")
        started = Started(directory / "s", sys.executable, "-I", "-S", "-c", TOLD, *map(str, words))
        talk, _ = told.accept()
    with talk:
        said, listeners, _, _ = socket.recv_fds(talk, 4, 1)
    if not listeners:
        started.end()
        pytest.skip(f"no notifications of system calls: {os.strerror(struct.unpack('=i', said)[0])}")
    holder = Holder(listeners[0])
    try:
        yield directory / "s", holder
        assert started.end() == 0
    finally:
        holder.end()


@pytest.mark.skipif(SECCOMP == 0, reason="the numbers of this machine's system calls are not known")
def test_a_command_that_waits_for_its_processor_begins_late_and_is_not_given_up(tmp_path: Path) -> None:
    with held(tmp_path) as (path, holder):
        raw = Raw(path)
        request = wire.ExecRequest([b"/bin/echo", b"late"], b"/", [(b"PATH", b"/usr/bin:/bin")])
        raw.send(wire.frame(wire.EXEC, request.pack()))
        frames = raw.frames()
        raw.close()
        assert holder.asked >= ASKED_OFTEN
    assert b"".join(payload for kind, payload in frames if kind == wire.STDOUT).endswith(b"late\n")
    kind, payload = frames[-1]
    assert (kind, payload[0]) == (wire.EXITED, wire.REASONS.index("EXITED"))
