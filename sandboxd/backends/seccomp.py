"""The system calls that nothing inside a sandbox may make, as a filter program for the kernel.

A deny list: what it names either reaches the kernel's parts with the worst record, or is of no use without
privileges that no sandbox has. Everything else is bounded by the namespaces. Refused calls fail with EPERM
(clone3 with ENOSYS, so that C libraries fall back to clone, whose flags a filter can read).

Beside the list: clone with any namespace flag; sockets of other families than unix, IPv4, IPv6 and netlink
(vsock is not bound to a network namespace); the ioctls that type into a terminal; a foreign instruction
set; changes of RLIMIT_RTTIME, which marks the processes of a command (see native/tree.h), except by who shows
a key; and changes of the limits, the priority and the scheduling of PID 1, which runs as the same user.
"""

from __future__ import annotations

import errno
import resource
import struct

from sandboxd.backends.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: number on x86_64, number on aarch64 (None: it does not exist there).
DENIED: dict[str, tuple[int, int | None]] = {
    # Mounts and roots.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Namespaces.
    "unshare": (272, 97),
    "setns": (308, 268),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # Keys are not bound to a namespace.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # The kernel's parts with the worst record.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Files by handle, past every directory's rights.
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # The machine.
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "query_module": (178, None),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    "kcmp": (312, 272),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    # Time.
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
}
CLONE, CLONE3, IOCTL = (56, 220), (435, 435), (16, 29)
SOCKET, SOCKETPAIR = (41, 198), (53, 199)
PRLIMIT, SETRLIMIT = (302, 261), (160, 164)
# Of the process that their first argument names.
SCHEDULING: dict[str, tuple[int, int]] = {
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
# Of a process, of a group, or of all that a user has; the two count these kinds from 0 and from 1.
SETPRIORITY, IOPRIO_SET = (141, 140), (251, 30)
PRIO_USER, IOPRIO_USER = 2, 3
KEY_BYTES = 16
# Flags of clone; 0x80 (time) cannot be given to it.
NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
FAMILIES = (1, 2, 10, 16)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
X32 = 0x40000000

LOAD, JUMP_EQ, JUMP_GE, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
# Offsets in seccomp_data; both machines are little-endian.
NR, ARCH, ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]


def _low(argument: int) -> int:
    return ARGUMENTS + 8 * argument


def _refuse(number: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | number)


def _clone() -> list[Instruction]:
    return [(LOAD, 0, 0, _low(0)), (JUMP_BITS, 0, 1, NAMESPACES), _refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]


def _socket() -> list[Instruction]:
    body: list[Instruction] = [(LOAD, 0, 0, _low(0))]
    for left, family in zip(range(len(FAMILIES), 0, -1), FAMILIES, strict=True):
        body.append((JUMP_EQ, left, 0, family))
    return [*body, _refuse(errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]


def _ioctl() -> list[Instruction]:
    typed = [(JUMP_EQ, 1, 0, TIOCSTI), (JUMP_EQ, 0, 1, TIOCLINUX)]
    return [(LOAD, 0, 0, _low(1)), *typed, _refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]


def _prlimit(key: bytes) -> list[Instruction]:
    """Refuses a new limit (a pointer that is not null) of PID 1, and a new RLIMIT_RTTIME of any process,
    unless the two arguments behind those of the call hold the key.
    """
    words = struct.unpack("<4I", key)
    shown: list[Instruction] = []
    for place, word in enumerate(words):
        # To the end that allows, or on with what else decides.
        left = 2 * (len(words) - 1 - place)
        shown += [(LOAD, 0, 0, _low(4) + 4 * place), (JUMP_EQ, 5 if place == 3 else 0, left, word)]
    return [
        (LOAD, 0, 0, _low(2)),
        (JUMP_EQ, 0, 2, 0),
        (LOAD, 0, 0, _low(2) + 4),
        (JUMP_EQ, len(shown) + 5, 0, 0),
        *shown,
        (LOAD, 0, 0, _low(0)),
        (JUMP_EQ, 2, 0, 1),
        (LOAD, 0, 0, _low(1)),
        (JUMP_EQ, 0, 1, resource.RLIMIT_RTTIME),
        _refuse(errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def _of_pid_1(argument: int) -> list[Instruction]:
    return [(LOAD, 0, 0, _low(argument)), (JUMP_EQ, 0, 1, 1), _refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]


def _priority(whole_user: int) -> list[Instruction]:
    return [
        (LOAD, 0, 0, _low(0)),
        (JUMP_EQ, 2, 0, whole_user),
        (LOAD, 0, 0, _low(1)),
        (JUMP_EQ, 0, 1, 1),
        _refuse(errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def _setrlimit() -> list[Instruction]:
    marked = (JUMP_EQ, 0, 1, resource.RLIMIT_RTTIME)
    return [(LOAD, 0, 0, _low(0)), marked, _refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]


def _verdicts(key: bytes) -> dict[str, list[Instruction]]:
    """What becomes of a call; each ends by itself."""
    return {
        "allow": [(RETURN, 0, 0, ALLOW)],
        "refuse": [_refuse(errno.EPERM)],
        "unknown": [_refuse(errno.ENOSYS)],
        "clone": _clone(),
        "socket": _socket(),
        "ioctl": _ioctl(),
        "prlimit": _prlimit(key),
        "setrlimit": _setrlimit(),
        "scheduling": _of_pid_1(0),
        "setpriority": _priority(PRIO_USER),
        "ioprio_set": _priority(IOPRIO_USER),
    }


def _ranges(column: int) -> list[tuple[int, str]]:
    """The numbers of calls from which on another verdict holds, in order."""
    verdicts = {numbers[column]: "refuse" for numbers in DENIED.values()}
    verdicts[CLONE3[column]] = "unknown"
    for name, call in (
        ("clone", CLONE),
        ("socket", SOCKET),
        ("socket", SOCKETPAIR),
        ("ioctl", IOCTL),
        ("prlimit", PRLIMIT),
        ("setrlimit", SETRLIMIT),
        ("setpriority", SETPRIORITY),
        ("ioprio_set", IOPRIO_SET),
        *(("scheduling", call) for call in SCHEDULING.values()),
    ):
        verdicts[call[column]] = name
    ranges = [(0, "allow")]
    for number in sorted(number for number in verdicts if number is not None):
        if ranges[-1][0] == number:
            ranges.pop()
        if not ranges or ranges[-1][1] != verdicts[number]:
            ranges.append((number, verdicts[number]))
        ranges.append((number + 1, "allow"))
    return [*ranges, (X32, "unknown")]


def _search(ranges: list[tuple[int, str]], tree: list[tuple[int, int | str, int | str]]) -> int | str:
    """Adds what finds a number's range to `tree`: nodes of a number, where those from it on go, and where
    those below it; a node by its index, a verdict by its name. Returns where the search begins."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    index = len(tree)
    tree.append((0, 0, 0))
    below = _search(ranges[:middle], tree)
    tree[index] = (ranges[middle][0], _search(ranges[middle:], tree), below)
    return index


def instructions(machine: str, key: bytes) -> list[Instruction]:
    """The filter for one kind of machine. Raises KeyError for others than x86_64 and aarch64.

    `key` are the 16 bytes that PID 1 shows when it marks a command.

    A search in ranges: the kernel runs it for every number there is whenever a sandbox puts it on.
    """
    arch, verdicts = AUDIT_ARCH[machine], _verdicts(key)
    tree: list[tuple[int, int | str, int | str]] = []
    _search(_ranges(list(AUDIT_ARCH).index(machine)), tree)
    code: list[Instruction] = [
        (LOAD, 0, 0, ARCH),
        (JUMP_EQ, 1, 0, arch),
        _refuse(errno.ENOSYS),
        (LOAD, 0, 0, NR),
    ]
    places: dict[int | str, int] = {index: index for index in range(len(tree))}
    end = len(tree)
    for name, body in verdicts.items():
        places[name] = end
        end += len(body)
    for index, (number, above, below) in enumerate(tree):
        code.append((JUMP_GE, places[above] - index - 1, places[below] - index - 1, number))
    return [*code, *(line for body in verdicts.values() for line in body)]


def program(machine: str, key: bytes) -> bytes:
    """The filter as the kernel takes it: an array of `sock_filter`; see `instructions`."""
    return b"".join(struct.pack("=HBBI", *line) for line in instructions(machine, key))
