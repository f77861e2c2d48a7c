"""Starts a launcher and cleans up behind it: the only part that keeps the rights of the user who started it.

Run as a program by `main`, which reads a `Spec` as JSON from its standard input and answers one line on its
standard output: `ready`; `answered` where another answers by now; or what failed and how to allow it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import sys as python

from sandboxd.backends import cgroup, claims, seccomp, users
from sandboxd.backends import syscalls as sys
from sandboxd.backends.confine import Confinement
from sandboxd.backends.launcher import CONTROL_SOCKET, Launcher, remove_remains
from sandboxd.backends.lock_file import is_at
from sandboxd.backends.records import Records
from sandboxd.backends.rootfs import STATE, UID, Base
from sandboxd.backends.starter import PROGRAM, launch
from sandboxd.backends.sweeper import sweep_for

LOCK_FILE = "launcher.lock"
LOCK_SECONDS, LOOK_SECONDS = 10.0, 0.1
LOG_FILE = "launcher.log"
CONTROL_BACKLOG = 16
# Of ioctl(2), and the flag that chattr(1) calls T.
GET_FLAGS, SET_FLAGS, TOP_OF_HIERARCHY = 0x80086601, 0x40086602, 0x00020000


# Each launcher is a process of its own that holds what is loaded here: no typing, no dataclasses.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class Spec(TypedDict):
        """What a launcher is told by the daemon that starts it."""

        state: str
        name: str
        cgroup_root: str
        read_only_paths: list[str]
        images: str
        guest: str
        uid_base: int
        grace: float


class Refused(Exception):
    """The host does not allow it; the message is one line for a person."""


class Answered(Exception):
    """There is a launcher already."""


def main() -> None:
    """Returns at once in the process that was started; the keeper lives on beside it."""
    spec: Spec = json.loads(python.stdin.read())
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = os.dup(1)
    code = 1
    try:
        _keep(spec, report)
        code = 0
    except Exception as error:
        # To the log first: the daemon may have been answered before, and the report is closed then.
        python.excepthook(*python.exc_info())
        if isinstance(error, Refused | OSError):
            why = str(error) if isinstance(error, Refused) else f"{error.strerror}: {error.filename}"
            os.write(report, os.fsencode(f"{why}\n"))
        raise
    finally:
        os._exit(code)


def _redirect(log: str) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target, source in ((0, null), (1, fd), (2, fd)):
        os.dup2(source, target)
    os.close(null)
    os.close(fd)


def _keep(spec: Spec, report: int) -> None:
    state = spec["state"]
    lock = _lock(state)
    if lock < 0:
        os.write(report, b"answered\n")
        return
    # Only now: until then it is the log of the launcher before.
    _redirect(os.path.join(state, LOG_FILE))
    hierarchies = _prepare(spec)
    # Guests whose launcher died come here, so that their end can be waited for.
    sys.prctl(sys.PR_SET_CHILD_SUBREAPER, 1)
    # Now: the launcher's user may be unable to walk there.
    os.chdir(state)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    control.bind(CONTROL_SOCKET)
    control.listen(CONTROL_BACKLOG)
    ready, unshared = os.pipe2(os.O_CLOEXEC)
    mapped, go = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        os.close(go)
        _become_launcher(spec, hierarchies, control, (unshared, mapped, report))
    control.close()
    for fd in (unshared, mapped):
        os.close(fd)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    try:
        if os.read(ready, 1):
            users.map_users(pid, spec["uid_base"])
            os.write(go, b"1")
        # A second byte says that it is up; a failure is told to its end once nothing is left of it.
        if os.read(ready, 1):
            os.close(report)
        _wait_for_all()
    finally:
        cgroup.remove(hierarchies)
        # By where this process is: the name may be another directory's by now, with a launcher of its own.
        remove_remains(".")
        os.close(lock)


def _open_outside(store: str, guest: str) -> list[int]:
    """The guest's program, the image store's layers, its records and what is on its way there; -1 each
    without a store. Only now: the mounts must be those of the new namespace, and this process is still the
    user who can walk there."""
    program = os.open(guest, os.O_RDONLY | os.O_CLOEXEC)
    if not store:
        return [program, -1, -1, -1]
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    names = ("layers", "images", "partial")
    return [program, *(os.open(os.path.join(store, name), flags) for name in names)]


def _lock(state: str) -> int:
    """One launcher for one state directory; waits for one that is ending, and makes the directory again where
    that one's daemon takes it away. Returns -1 where one answers: it was on its way when its daemon died.
    """
    path = os.path.join(state, LOCK_FILE)
    looks = 0

    def look(_number: int, _frame: object) -> None:
        nonlocal looks
        looks += 1
        if looks * LOOK_SECONDS >= LOCK_SECONDS:
            raise Refused(
                f"another launcher holds {path} and does not end; stop it or use another state directory"
            )
        if _answers():
            raise Answered

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    try:
        while True:
            fd = _open_lock(state, path)
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if is_at(fd, path):
                    return fd
                os.close(fd)
    except Answered:
        return -1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _open_lock(state: str, path: str) -> int:
    """-1 where the directory was taken away meanwhile."""
    os.makedirs(state, 0o711, exist_ok=True)
    try:
        os.chdir(state)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return -1


def _answers() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as control:
        return control.connect_ex(CONTROL_SOCKET) == 0


def _prepare(spec: Spec) -> list[cgroup.Hierarchy]:
    hierarchies = _claim(spec)
    # What a launcher left that was killed together with its keeper.
    cgroup.sweep(hierarchies)
    claims.sweep_orphans(hierarchies)
    remove_remains(spec["state"])
    for name in ("sandboxes", "base"):
        path = os.path.join(spec["state"], name)
        os.mkdir(path, 0o711)
        _spread(path)
        if users.has_range(spec["uid_base"]):
            os.chown(path, spec["uid_base"], spec["uid_base"])
    if users.has_range(spec["uid_base"]):
        cgroup.give(hierarchies, spec["uid_base"])
    return hierarchies


def _claim(spec: Spec) -> list[cgroup.Hierarchy]:
    with open("/proc/self/cgroup") as file:
        own = file.read()
    try:
        return claims.claim(spec["cgroup_root"], own, spec["name"])
    except BlockingIOError as error:
        raise Refused(
            f"an earlier launcher of {spec['state']}, which was removed meanwhile, still has"
            f" {error.filename}; it ends {spec['grace']:g} s after its daemon: try again then, or name"
            " another state_dir"
        ) from error


def _spread(path: str) -> None:
    """Has ext4 put the directories in this one into many groups of its inodes. It gives none out again that
    was freed in the last minutes while its group has another, and looks at each: one group, used by turns,
    made a start cost twice as much. Other file systems have no such mark."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        (flags,) = struct.unpack("i", fcntl.ioctl(fd, GET_FLAGS, bytes(4)))
        fcntl.ioctl(fd, SET_FLAGS, struct.pack("i", flags | TOP_OF_HIERARCHY))
    except OSError:
        return
    finally:
        os.close(fd)


def _wait_for_all() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _become_launcher(
    spec: Spec,
    hierarchies: list[cgroup.Hierarchy],
    control: socket.socket,
    channels: tuple[int, int, int],
) -> NoReturn:
    unshared, mapped, report = channels
    code = 1
    told = False
    try:
        hierarchies = cgroup.settle(hierarchies)
        outside = _new_user(unshared, mapped, spec)
        launcher = _build(spec, hierarchies, control, outside, [report, unshared])
        os.write(report, b"ready\n")
        os.write(unshared, b"1")
        os.close(unshared)
        os.close(report)
        told = True  # From now on the number is somebody else's: a daemon's connection, for instance.
        launcher.run()
        code = 0
    except Exception as error:
        python.excepthook(*python.exc_info())
        if not told and isinstance(error, Refused | OSError):
            why = str(error) if isinstance(error, Refused) else _explain(error)
            os.write(report, os.fsencode(f"{why}\n"))
        raise
    finally:
        os._exit(code)


def _new_user(unshared: int, mapped: int, spec: Spec) -> list[int]:
    """Becomes root of a user namespace, which is nobody outside of it; returns what it opened before."""
    try:
        sys.unshare(sys.CLONE_NEWUSER | sys.CLONE_NEWNS)
    except OSError as error:
        raise Refused(_explain(error)) from error
    outside = _open_outside(spec["images"], spec["guest"])
    os.write(unshared, b"1")
    if not os.read(mapped, 1):
        raise Refused("the keeper could not map users into a user namespace; its log says why")
    os.close(mapped)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # Without it this process's own files in /proc would belong to somebody who does not exist here.
    sys.prctl(sys.PR_SET_DUMPABLE, 1)
    return outside


def _build(
    spec: Spec,
    hierarchies: list[cgroup.Hierarchy],
    control: socket.socket,
    outside: list[int],
    channels: list[int],
) -> Launcher:
    mapped_range = users.mapped_users() > 1
    program, layers, records, partial = outside
    if mapped_range:
        os.setgroups([])
    cgroups = cgroup.Cgroups(hierarchies)
    base = Base(".", spec["read_only_paths"], UID if mapped_range else 0, program, layers)
    base.enter()
    os.chdir(STATE)
    sweeper = _start_sweeper(cgroups, [control.fileno(), *channels, records, partial])
    starter = launch(PROGRAM, cgroups.descriptors)
    key = os.urandom(seccomp.KEY_BYTES)
    confinement = Confinement(base, cgroups, key, mapped_range=mapped_range)
    sys.set_title(sys.title_area(), b"sandboxd-launcher")
    return Launcher(control, confinement, Records(records), partial, (starter, sweeper), spec["grace"])


def _start_sweeper(cgroups: cgroup.Cgroups, not_its: list[int]) -> socket.socket:
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    for fd in not_its:
        if fd >= 0:
            os.close(fd)
    sys.set_title(sys.title_area(), b"sandboxd-sweeper")
    code = 1
    try:
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        sweep_for(theirs, directory, cgroups)
        code = 0
    except OSError:
        python.excepthook(*python.exc_info())
    finally:
        os._exit(code)


def _explain(error: OSError) -> str:
    """One line: what failed, and which switch of this host forbids it."""
    what = f"{error.filename or 'a system call'} failed: {error.strerror}"
    for path, blocked, cure in SWITCHES:
        try:
            with open(path) as file:
                value = file.read().strip()
        except OSError:
            continue
        if value == blocked:
            return f"{what}; {path} is {value}: {cure}"
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return f"{what}; a container needs --privileged, or seccomp, AppArmor and masked paths unconfined"
    return f"{what}; the kernel needs user namespaces, and overlay mounts inside of them (5.12 or later)"


SWITCHES = (
    ("/proc/sys/user/max_user_namespaces", "0", "allow them with `sysctl user.max_user_namespaces=15000`"),
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "allow it with `sysctl kernel.unprivileged_userns_clone=1`",
    ),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "allow it with `sysctl kernel.apparmor_restrict_unprivileged_userns=0` or an AppArmor profile",
    ),
)
