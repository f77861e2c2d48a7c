"""The filter program, run by a small interpreter of it: what it says to each call on both machines."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandboxd.backends import rootfs, seccomp

MACHINES = ("x86_64", "aarch64")
KEY = bytes(range(0xF0, 0x100))
SHOWN = (0xF7F6F5F4F3F2F1F0, 0xFFFEFDFCFBFAF9F8)


@dataclass
class Call:
    """What the kernel shows to a filter."""

    number: int
    arguments: tuple[int, ...] = ()
    arch: int | None = None

    def word(self, offset: int, machine: str) -> int:
        if offset == seccomp.NR:
            return self.number
        if offset == seccomp.ARCH:
            return seccomp.AUDIT_ARCH[machine] if self.arch is None else self.arch
        index, high = divmod(offset - seccomp.ARGUMENTS, 8)
        value = (*self.arguments, 0, 0, 0, 0, 0, 0)[index]
        return (value >> 32 if high else value) & 0xFFFFFFFF


def verdict(machine: str, call: Call) -> int:
    """0 for an allowed call, else the errno."""
    code = seccomp.instructions(machine, KEY)
    accumulator, at = 0, 0
    while True:
        op, yes, no, value = code[at]
        at += 1
        if op == seccomp.LOAD:
            accumulator = call.word(value, machine)
        elif op == seccomp.RETURN:
            return 0 if value == seccomp.ALLOW else value & 0xFFFF
        else:
            holds = {
                seccomp.JUMP_EQ: accumulator == value,
                seccomp.JUMP_GE: accumulator >= value,
                seccomp.JUMP_BITS: bool(accumulator & value),
            }[op]
            at += yes if holds else no


@pytest.mark.parametrize("machine", MACHINES)
def test_every_listed_call_is_refused(machine: str) -> None:
    column = MACHINES.index(machine)
    for name, numbers in seccomp.DENIED.items():
        if (number := numbers[column]) is not None:
            assert verdict(machine, Call(number)) == errno.EPERM, name
    assert verdict(machine, Call(seccomp.CLONE3[column])) == errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_everything_else_is_allowed(machine: str) -> None:
    column = MACHINES.index(machine)
    denied = {numbers[column] for numbers in seccomp.DENIED.values()} | {seccomp.CLONE3[column]}
    denied |= {seccomp.SOCKET[column], seccomp.SOCKETPAIR[column]}  # Family 0 is none.
    for number in range(470):
        if number not in denied:
            assert verdict(machine, Call(number)) == 0, number


@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_instruction_sets_are_refused(machine: str) -> None:
    assert verdict(machine, Call(0, arch=0x40000003)) == errno.ENOSYS
    assert verdict(machine, Call(seccomp.X32 + 1)) == errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide(machine: str) -> None:
    column = MACHINES.index(machine)
    clone, sock, ioctl = seccomp.CLONE[column], seccomp.SOCKET[column], seccomp.IOCTL[column]
    assert verdict(machine, Call(clone, (0x11,))) == 0
    assert verdict(machine, Call(clone, (0x3D0F00,))) == 0  # A thread.
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, Call(clone, (flag | 0x11,))) == errno.EPERM
    for number in (sock, seccomp.SOCKETPAIR[column]):
        for family in seccomp.FAMILIES:
            assert verdict(machine, Call(number, (family,))) == 0
        for family in (0, 17, 30, 38, 40):
            assert verdict(machine, Call(number, (family,))) == errno.EAFNOSUPPORT
    assert verdict(machine, Call(ioctl, (0, 0x5401))) == 0
    # The kernel looks at 32 bits of the number, and so must the filter.
    for number in (0x5412, 0x541C, (1 << 32) | 0x5412):
        assert verdict(machine, Call(ioctl, (0, number))) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_only_who_has_the_key_changes_the_mark_of_a_command(machine: str) -> None:
    column = MACHINES.index(machine)
    prlimit, setrlimit = seccomp.PRLIMIT[column], seccomp.SETRLIMIT[column]
    for pointer in (1, 1 << 32):
        assert verdict(machine, Call(prlimit, (0, 15, pointer))) == errno.EPERM
        assert verdict(machine, Call(prlimit, (77, 15, pointer))) == errno.EPERM
        assert verdict(machine, Call(prlimit, (0, 15, pointer, 0, *SHOWN))) == 0
        for bit in range(128):
            shown = [SHOWN[0] ^ (1 << bit), SHOWN[1]] if bit < 64 else [SHOWN[0], SHOWN[1] ^ (1 << bit - 64)]
            assert verdict(machine, Call(prlimit, (0, 15, pointer, 0, *shown))) == errno.EPERM
        for limit in range(16):
            assert verdict(machine, Call(prlimit, (1, limit, pointer))) == errno.EPERM
        assert verdict(machine, Call(prlimit, (0, 7, pointer))) == 0
        assert verdict(machine, Call(prlimit, (77, 7, pointer))) == 0
    assert verdict(machine, Call(prlimit, (1, 7, 0))) == 0
    assert verdict(machine, Call(prlimit, (0, 15, 0))) == 0
    assert verdict(machine, Call(setrlimit, (15, 1))) == errno.EPERM
    assert verdict(machine, Call(setrlimit, (7, 1))) == 0


@pytest.mark.parametrize("machine", MACHINES)
def test_pid_1_is_not_slowed_down(machine: str) -> None:
    column = MACHINES.index(machine)
    for numbers in seccomp.SCHEDULING.values():
        assert verdict(machine, Call(numbers[column], (1, 3))) == errno.EPERM
        assert verdict(machine, Call(numbers[column], (0, 3))) == 0
        assert verdict(machine, Call(numbers[column], (77, 3))) == 0
    # Kinds: a process, a group, all of a user.
    for number, kinds in ((seccomp.SETPRIORITY[column], (0, 1, 2)), (seccomp.IOPRIO_SET[column], (1, 2, 3))):
        for kind in kinds:
            assert verdict(machine, Call(number, (kind, 1, 19))) == errno.EPERM
        for kind in kinds[:2]:
            assert verdict(machine, Call(number, (kind, 0, 19))) == 0
            assert verdict(machine, Call(number, (kind, 77, 19))) == 0
        assert verdict(machine, Call(number, (kinds[2], 0, 19))) == errno.EPERM


def test_the_documentation_names_every_call_that_is_refused_and_no_other() -> None:
    """And what is covered in /proc and there in /dev."""
    page = (Path(__file__).parents[2] / "docs" / "isolation.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE))
    kinds = ("mounts and roots", "namespaces", "keys", "files by handle", "the machine", "time")
    worst = "parts of the kernel with the worst record"
    named = {name for kind in (*kinds, worst) for name in re.findall(r"`(\w+)`", rows[kind])}
    assert named == seccomp.DENIED.keys() | {"clone", "clone3"}
    assert set(re.findall(r"`(\w+)`", rows["of the first process"])) == seccomp.SCHEDULING.keys() | {
        *("setpriority", "ioprio_set", "prlimit", "setrlimit")
    }
    assert re.findall(r"`([\w-]+)`", rows["`/proc`"]) == list(rootfs.MASKED)
    assert re.findall(r"`(\w+)`", rows["`/sys`, `/dev`"]) == list(rootfs.DEVICES)
