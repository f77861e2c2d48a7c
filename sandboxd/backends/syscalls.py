"""System calls that Python 3.11 does not offer, by ctypes; all raise OSError and say on what."""

from __future__ import annotations

import ctypes
import os
import signal

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock: a copy of this process must not find it in the hands of nobody.
_locked = ctypes.PyDLL(None, use_errno=True)

MACHINE = os.uname().machine
NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
CAPABILITY_VERSION_3 = 0x20080522


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} on {target} {data}".rstrip())


def unmount(target: str) -> None:
    """umount2(2), lazily: what still uses it keeps it until it is done."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def harden_mounts(target: str, attributes: int) -> None:
    """mount_setattr(2): sets the attributes on `target` and all below it, and keeps those they have."""
    fields = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    number = NUMBERS[MACHINE]["mount_setattr"]
    arguments = (target.encode(), AT_RECURSIVE, ctypes.byref(fields), ctypes.c_size_t(32))
    _check(_libc.syscall(number, AT_FDCWD, *arguments), f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    _check(_libc.syscall(NUMBERS[MACHINE]["pivot_root"], new.encode(), old.encode()), f"pivot_root {new}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def fork_into(flags: int) -> int:
    """Forks with namespaces of its own for the child; 0 in the child, its pid in the parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _locked.syscall(NUMBERS[MACHINE]["clone"], ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0)
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number), f"clone {flags:#x}")
    return pid


def prctl(option: int, *values: int) -> None:
    """prctl(2) with up to four numbers."""
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def set_seccomp(program: ctypes.Structure) -> None:
    """Puts this process and all that it starts under a filter program (a `sock_fprog`)."""
    _check(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), 0, 0), "prctl seccomp")


def set_name(name: bytes) -> None:
    """The name that `ps` and `top` show, at most 15 bytes."""
    _check(_libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0), "prctl name")


def drop_bounding() -> None:
    """Gives up every capability as something that a program could bring; the present ones stay."""
    number = 0
    while _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) == 0:
        number += 1


def drop_capabilities() -> None:
    """Gives up every capability that this process has."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    number = NUMBERS[MACHINE]["capset"]
    _check(_libc.syscall(number, ctypes.byref(header), ctypes.byref(nothing)), "capset")


def set_hostname(name: str) -> None:
    """sethostname(2)."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def title_area() -> tuple[int, int]:
    """Where this process keeps its command line: first and last address."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    # Fields 48 and 49 of proc(5), counted from the state, which is field 3.
    return int(fields[45]), int(fields[46])


def set_title(area: tuple[int, int], title: bytes) -> None:
    """Overwrites the command line, which would tell a sandbox about its host."""
    begin, end = area
    title = title[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, title, len(title))
    set_name(title[:15])
