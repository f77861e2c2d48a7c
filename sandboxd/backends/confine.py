"""What a fresh copy of the launcher does to become PID 1 of a sandbox, in an order that keeps each step safe.

Groups before memory is used; mounts before the rights to make them are given up; the filter last, when
nothing that it refuses is needed any more.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct

from sandboxd.backends import syscalls as sys
from sandboxd.backends.cgroup import Cgroups
from sandboxd.backends.rootfs import BRANCH_PREFIX, UID, Base
from sandboxd.backends.seccomp import Program
from sandboxd.guest.main import Guest

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
HOSTNAME = "sandbox"
ERROR_FILE = "error"


TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


class Order:
    """One sandbox to make, as it comes over the control socket.

    `lower` are the directories below its writable layer, the highest first; `host_system` says that they lie
    upon the host's own.
    """

    __slots__ = ("cwd", "host_network", "host_system", "limits", "lower", "sandbox_id")

    def __init__(self, message: dict[str, Any]) -> None:
        self.sandbox_id: str = message["id"]
        self.cwd: str = message["cwd"]
        self.limits: dict[str, float] = message["limits"]
        self.host_network: bool = message["host_network"]
        self.host_system: bool = message["host_system"]
        branches = [f"/state/sandboxes/{BRANCH_PREFIX}{name}" for name in message["branches"]]
        self.lower: list[str] = branches + [f"/l/{name}" for name in message["layers"]]


class Confinement:
    """What all sandboxes of a launcher share; `become_guest` never returns.

    `mapped_range` says that the launcher's user namespace has many users (it was started by root), so
    that a sandbox can have its own; else a second namespace gives the one user its number.
    """

    def __init__(self, base: Base, cgroups: Cgroups, program: Program, *, mapped_range: bool) -> None:
        self._base = base
        self._cgroups = cgroups
        self._program = program
        self._mapped_range = mapped_range
        self._title_area = sys.title_area()

    @property
    def enforced(self) -> set[str]:
        """The limits that control groups hold here."""
        return self._cgroups.enforced

    @property
    def nested(self) -> bool:
        """A user namespace for each sandbox: numbers its user, and counts processes for RLIMIT_NPROC."""
        return not self._mapped_range or "pids" not in self._cgroups.enforced

    def become_guest(self, order: Order, listener: socket.socket, lifeline: int) -> NoReturn:
        """Ends the process; a failure is left as a line in the sandbox's directory."""
        home = os.open(f"/state/sandboxes/{order.sandbox_id}", os.O_PATH | os.O_CLOEXEC)
        code = 1
        try:
            guest = self._confined(order, listener, lifeline)
            guest.serve()
            code = 0
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            fd = os.open(ERROR_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=home)
            os.write(fd, f"{error.strerror or error}{where}".encode())
        finally:
            os._exit(code)

    def _confined(self, order: Order, listener: socket.socket, lifeline: int) -> Guest:
        memory = self._cgroups.enter(order.sandbox_id, order.limits)
        proc = os.open("/proc/self", os.O_PATH | os.O_CLOEXEC)
        oom_score_fd = os.open("oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        flags = sys.CLONE_NEWNS | sys.CLONE_NEWIPC | sys.CLONE_NEWUTS | sys.CLONE_NEWCGROUP
        sys.unshare(flags if order.host_network else flags | sys.CLONE_NEWNET)
        self._base.assemble(
            order.sandbox_id, order.cwd, order.limits, order.lower, host_system=order.host_system
        )
        sys.set_hostname(HOSTNAME)
        if not order.host_network:
            _raise_loopback()
        self._limit(order.limits)
        self._change_user(proc)
        # After the sandbox's user namespace was made: a limit from before would bound all of them together.
        if (pids := order.limits.get("pids")) is not None and "pids" not in self._cgroups.enforced:
            _set_limit(resource.RLIMIT_NPROC, int(pids) + 1)
        _close_all_but({listener.fileno(), lifeline, oom_score_fd} | memory.descriptors)
        sys.set_title(self._title_area, b"sandboxd-guest")
        os.umask(0o022)
        os.setsid()
        self._lock(lifeline)
        return Guest(listener, memory, lifeline=lifeline, oom_score_fd=oom_score_fd)

    def _limit(self, limits: dict[str, float]) -> None:
        enforced = self._cgroups.enforced
        _set_limit(resource.RLIMIT_CORE, 0)
        if (open_files := limits.get("open_files")) is not None:
            _set_limit(resource.RLIMIT_NOFILE, int(open_files))
        if (memory := limits.get("memory_bytes")) is not None and "memory" not in enforced:
            _set_limit(resource.RLIMIT_AS, int(memory))

    def _change_user(self, proc: int) -> None:
        outer = 0
        sys.drop_bounding()
        if self._mapped_range:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            outer = UID
        if not self.nested:
            return
        # A change of user takes one's own files in /proc away from the new user.
        sys.prctl(sys.PR_SET_DUMPABLE, 1)
        sys.unshare(sys.CLONE_NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{UID} {outer} 1"),
            ("gid_map", f"{UID} {outer} 1"),
        ):
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
            os.write(fd, text.encode())
            os.close(fd)
        # A new user namespace began with all of them.
        sys.drop_bounding()

    def _lock(self, lifeline: int) -> None:
        sys.drop_capabilities()
        sys.prctl(sys.PR_SET_NO_NEW_PRIVS, 1)
        sys.prctl(sys.PR_SET_DUMPABLE, 0)
        # Every change of rights above would have cleared it. The launcher may have died before that.
        sys.prctl(sys.PR_SET_PDEATHSIG, signal.SIGKILL)
        poll = select.poll()
        poll.register(lifeline, select.POLLIN)
        if poll.poll(0):
            os._exit(1)
        sys.set_seccomp(self._program)


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def _close_all_but(keep: set[int]) -> None:
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    first = 3
    for fd in sorted(keep):
        if fd >= first:
            os.closerange(first, fd)
            first = fd + 1
    os.closerange(first, 1 << 20)
