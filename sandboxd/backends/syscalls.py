"""System calls that Python 3.11 does not offer, by ctypes; all raise OSError and say on what."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

MACHINE = os.uname().machine
NUMBERS = {
    "x86_64": {"pivot_root": 155, "mount_setattr": 442},
    "aarch64": {"pivot_root": 41, "mount_setattr": 442},
}

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
AT_FDCWD, AT_RECURSIVE = -100, 0x8000


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


def prctl(option: int, *values: int) -> None:
    """prctl(2) with up to four numbers."""
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def set_name(name: bytes) -> None:
    """The name that `ps` and `top` show, at most 15 bytes."""
    _check(_libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0), "prctl name")


def title_area() -> tuple[int, int]:
    """Where this process keeps its command line: first and last address."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    # Fields 48 and 49 of proc(5), counted from the state, which is field 3.
    return int(fields[45]), int(fields[46])


def set_title(area: tuple[int, int], title: bytes) -> None:
    """Overwrites the command line: what `ps` shows tells one process from another."""
    begin, end = area
    title = title[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, title, len(title))
    set_name(title[:15])
