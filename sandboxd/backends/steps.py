"""The steps that make a sandbox, as data: Python decides what is done and in which order, C does it.

A step is a tuple of its name and its arguments. The starter (native/starter.c) carries lists of them out,
some itself and the rest as what becomes the sandbox's first process; the first that fails ends the list.
Descriptors go by slots, which steps fill and name.
"""

from __future__ import annotations

import errno
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

Step = tuple[str | int | bytes, ...]

# Names and arguments, in the order of native/steps.c: n a number, s a text, b bytes, d an open slot, f a slot
# to fill.
OPS = (
    ("block", "n"),  # the steps of a block that was defined before
    ("mkdir", "dsn"),  # directory, path, mode
    ("makedirs", "s"),  # path; may be there
    ("listen", "snf"),  # path, backlog, slot
    ("open", "dsnfn"),  # directory, path, flags, slot, whether a failure leaves the slot empty
    ("write", "dssn"),  # directory, path, text, whether the file may be missing
    ("close", "f"),  # slot
    ("workspace", "snn"),  # path, owner, whether a directory that is there stays as it is
    ("chdir", "s"),
    ("unshare", "n"),
    ("mount", "sssns"),  # source, target, kind, flags, data
    ("umount", "s"),
    ("chroot", "s"),
    ("sethostname", "s"),
    ("loopback", ""),
    ("setrlimit", "nn"),  # kind, value; never above the hard limit
    ("setuser", "n"),  # user and group, and no other group
    ("drop_bounding", ""),
    ("drop_capabilities", "n"),  # all but those whose bits are set
    ("prctl", "nn"),
    ("keep", "b"),  # slots; everything else is closed
    ("title", "s"),
    ("setsid", ""),
    ("alive", "d"),  # ends the start if that pipe has ended
    ("seccomp", "b"),  # instructions
    ("key", "b"),  # what the filter asks for when a command is marked
    ("into", "d"),  # a control group of version 2 that the new process begins in, if the kernel can
    ("join", "d"),  # enters that group unless it began there
    ("give", "ds"),  # hands the descriptor to the launcher, under that name
    ("rename", "dss"),  # directory, path, new path
)
HERE, LIFELINE, LISTENER, HOME, OOM_SCORE, KILLS, PEAK, LIMIT, PROC, GROUP, UPPER = range(11)
# From here on: the descriptors that the starter was given.
INHERITED = 12
INHERITED_MOST = 8
BLOCKS = 16

_CODES = {name: (number, takes) for number, (name, takes) in enumerate(OPS)}
_NUMBER, _SIZE = struct.Struct("=q"), struct.Struct("=H")


def encode(steps: Iterable[Step]) -> bytes:
    """The bytes that the starter reads. Raises OSError for a text that no system call takes."""
    parts: list[bytes] = []
    for name, *arguments in steps:
        code, takes = _CODES[str(name)]
        parts.append(bytes((code,)))
        for kind, argument in zip(takes, arguments, strict=True):
            if isinstance(argument, int):
                parts.append(_NUMBER.pack(argument) if kind == "n" else bytes((argument,)))
            else:
                parts += _text(argument)
    return b"".join(parts)


def _text(argument: str | bytes) -> tuple[bytes, bytes, bytes]:
    text = argument
    if isinstance(text, str):
        text = os.fsencode(text)
        if b"\0" in text:
            raise OSError(errno.EINVAL, "a zero byte in a text", argument)
    if len(text) > 0xFFFF:
        raise OSError(errno.E2BIG, f"{len(text)} bytes are more than a step takes")
    return _SIZE.pack(len(text)), text, b"\0"
