"""What a fresh copy of the starter does to become PID 1 of a sandbox, in an order that keeps each step safe.

Groups before memory is used; mounts before the rights to make them are given up; the filter last, when
nothing that it refuses is needed any more.
"""

from __future__ import annotations

import errno
import os
import resource
import signal

from sandboxd.backends import seccomp
from sandboxd.backends import syscalls as sys
from sandboxd.backends.cgroup import Cgroups
from sandboxd.backends.rootfs import BRANCH_PREFIX, STATE, UID, VACANT_PREFIX, Base
from sandboxd.backends.starter import TREE
from sandboxd.backends.steps import HERE, HOME, KILLS, LIFELINE, LIMIT, LISTENER, OOM_SCORE, PEAK, PROC

HOSTNAME = "sandbox"
GUEST_SOCKET = "guest.sock"
GUEST_BACKLOG = 512
# Written by the starter: native/starter.c.
ERROR_FILE = "error"
# Blocks of steps beside those of the root: of sandboxes whose commands have one user, and of the others.
LOCK, LOCK_WITH_USERS = 2, 3
# What a guest keeps there: to become those users, and to end what runs as one of them. Its commands get none.
GUEST_CAPABILITIES = 1 << sys.CAP_SETUID | 1 << sys.CAP_SETGID | 1 << sys.CAP_KILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandboxd.backends.steps import Step


class Order:
    """One sandbox to make, as it comes over the control socket.

    `lower` are the directories below its writable layer, the highest first; `host_system` says that they lie
    upon the host's own. `vacant` is the place that it takes over, if there is one (see `vacancies`), with
    `alike` from a sandbox with the same limits.
    """

    __slots__ = (
        "alike",
        "cwd",
        "host_network",
        "host_system",
        "limits",
        "lower",
        "sandbox_id",
        "users",
        "vacant",
    )

    def __init__(self, message: dict[str, Any], vacant: str = "", *, alike: bool = False) -> None:
        self.sandbox_id: str = message["id"]
        self.vacant, self.alike = vacant, alike
        self.cwd: str = message["cwd"]
        self.limits: dict[str, float] = message["limits"]
        self.host_network: bool = message["host_network"]
        self.host_system: bool = message["host_system"]
        # An older daemon does not say it.
        self.users: bool = message.get("users", False)
        branches = [f"{STATE}/{BRANCH_PREFIX}{name}" for name in message["branches"]]
        self.lower: list[str] = branches + [f"{TREE}/l/{name}" for name in message["layers"]]


class Confinement:
    """What all sandboxes of a launcher share.

    `key` is what the filter knows a guest by: 16 bytes that no sandbox may learn. `mapped_range`
    says that the launcher's user namespace has many users (it was started by root), so that a sandbox can
    have its own; else a second namespace gives the one user its number.
    """

    def __init__(self, base: Base, cgroups: Cgroups, key: bytes, *, mapped_range: bool) -> None:
        self._base = base
        self._cgroups = cgroups
        self._key = key
        self._mapped_range = mapped_range

    @property
    def enforced(self) -> set[str]:
        """The limits that control groups hold here."""
        return self._cgroups.enforced

    @property
    def nested(self) -> bool:
        """A user namespace for each sandbox: numbers its user, and counts processes for RLIMIT_NPROC."""
        return not self._mapped_range or "pids" not in self._cgroups.enforced

    def blocks(self) -> dict[int, list[Step]]:
        """The steps that are the same for all sandboxes; the starter is to know them before others."""
        locks = {LOCK: self._lock(0), LOCK_WITH_USERS: self._lock(GUEST_CAPABILITIES)}
        return {**self._base.blocks(), **locks}

    def once(self) -> list[Step]:
        """What the starter does before it makes any: its copies inherit it."""
        return [("drop_bounding",)]

    def prepare(self, order: Order) -> list[Step]:
        """What the starter itself does: once it is done the sandbox's socket takes connections."""
        place: Step = ("mkdir", HERE, order.sandbox_id, 0o711)
        if order.vacant:
            place = ("rename", HERE, f"{VACANT_PREFIX}{order.vacant}", order.sandbox_id)
        return [
            place,
            ("listen", f"{order.sandbox_id}/{GUEST_SOCKET}", GUEST_BACKLOG, LISTENER),
            *self._cgroups.prepare(order.sandbox_id, order.limits),
        ]

    def become(self, order: Order) -> list[Step]:
        """What makes the new process the first of its sandbox. Raises OSError."""
        if order.users and self.nested:
            raise OSError(errno.EPERM, "there is one user for all, and commands cannot have others")
        flags = sys.CLONE_NEWNS | sys.CLONE_NEWIPC | sys.CLONE_NEWUTS | sys.CLONE_NEWCGROUP
        network = 0 if order.host_network else sys.CLONE_NEWNET
        root = self._base.steps(
            order.sandbox_id,
            order.cwd,
            order.limits,
            order.lower,
            host_system=order.host_system,
            has_work=bool(order.vacant),
        )
        return [
            # First: a failure is left in there as a line of text.
            ("open", HERE, f"{STATE}/{order.sandbox_id}", os.O_PATH, HOME, False),
            *self._cgroups.enter(order.sandbox_id, order.limits, order.vacant, alike=order.alike),
            ("open", HERE, f"{TREE}/proc/self", os.O_PATH, PROC, False),
            ("open", PROC, "oom_score_adj", os.O_RDWR, OOM_SCORE, False),
            ("unshare", flags | network),
            *root,
            ("sethostname", HOSTNAME),
            *([] if order.host_network else [("loopback",)]),
            *self._limit(order.limits),
            *self._change_user(users=order.users),
            # After its user namespace was made: a limit from before would bound all sandboxes together.
            *self._limit_processes(order.limits),
            ("block", LOCK_WITH_USERS if order.users else LOCK),
        ]

    def _limit(self, limits: dict[str, float]) -> list[Step]:
        steps: list[Step] = [("setrlimit", resource.RLIMIT_CORE, 0)]
        if (open_files := limits.get("open_files")) is not None:
            steps.append(("setrlimit", resource.RLIMIT_NOFILE, int(open_files)))
        if (memory := limits.get("memory_bytes")) is not None and "memory" not in self.enforced:
            steps.append(("setrlimit", resource.RLIMIT_AS, int(memory)))
        return steps

    def _limit_processes(self, limits: dict[str, float]) -> list[Step]:
        pids = limits.get("pids")
        if pids is None or "pids" in self.enforced:
            return []
        return [("setrlimit", resource.RLIMIT_NPROC, int(pids) + 1)]

    def _change_user(self, *, users: bool) -> list[Step]:
        outer = UID if self._mapped_range else 0
        own: list[Step] = [("setuser", UID)] if self._mapped_range else []
        if users:
            # Else the change would take all capabilities; those that are kept LOCK_WITH_USERS says.
            own = [("prctl", sys.PR_SET_KEEPCAPS, 1), *own, ("prctl", sys.PR_SET_KEEPCAPS, 0)]
        if not self.nested:
            return own
        return [
            *own,
            # A change of user takes one's own files in /proc away from the new user.
            ("prctl", sys.PR_SET_DUMPABLE, 1),
            ("unshare", sys.CLONE_NEWUSER),
            ("write", PROC, "setgroups", "deny", False),
            ("write", PROC, "uid_map", f"{UID} {outer} 1", False),
            ("write", PROC, "gid_map", f"{UID} {outer} 1", False),
            # The starter has none left, but a new user namespace begins with all of them.
            ("drop_bounding",),
        ]

    def _lock(self, capabilities: int) -> list[Step]:
        return [
            ("keep", bytes((LIFELINE, LISTENER, OOM_SCORE, KILLS, PEAK, LIMIT))),
            ("title", "sandboxd-guest"),
            ("setsid",),
            ("drop_capabilities", capabilities),
            ("prctl", sys.PR_SET_NO_NEW_PRIVS, 1),
            ("prctl", sys.PR_SET_DUMPABLE, 0),
            # Every change of rights above would have cleared it. The starter may have died before that.
            ("prctl", sys.PR_SET_PDEATHSIG, signal.SIGKILL),
            ("alive", LIFELINE),
            ("key", self._key),
            ("seccomp", seccomp.program(sys.MACHINE, self._key)),
        ]
