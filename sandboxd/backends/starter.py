"""The launcher's side of the starter, the small program that makes sandboxes: see native/starter.c.

It is a child of the launcher, works where the launcher does, and ends with it; its guests end with it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque

from sandboxd.backends.loop import GONE, IN, OUT, Loop
from sandboxd.backends.steps import encode

TREE = "/t"
"""What the launcher's root has beside the place of a sandbox's root: see `rootfs`."""
PROGRAM = f"{TREE}/guest"
"""Where the launcher's tree has it."""
ORDER_BYTES = 1 << 16
ANSWER_BYTES = 1 << 12

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sandboxd.backends.steps import Step

    Started = Callable[[int, str], None]


def launch(program: str, inherited: list[int]) -> socket.socket:
    """Starts the program with these descriptors and returns the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    try:
        for fd in (theirs.fileno(), *inherited):
            os.set_inheritable(fd, True)
        numbers = [str(number) for number in (parent, theirs.fileno(), *inherited)]
        # This name is what a sandbox sees.
        os.execve(program, ["sandboxd-guest", "starter", *numbers], {})  # noqa: S606
    except OSError as error:
        os.write(2, f"the starter: {error.strerror}: {program}\n".encode())
    finally:
        os._exit(2)


def start_order(ours: Iterable[Step], theirs: Iterable[Step]) -> bytes:
    """Has the starter do its own steps, then those of a sandbox's first process. Raises OSError."""
    first = encode(ours)
    return b"s" + struct.pack("=I", len(first)) + first + encode(theirs)


class Starter:
    """Orders to the starter and what it tells; never waits for it.

    `ended` hears the pid and the wait status of each sandbox's first process, after its start was answered;
    `given` a sandbox's name and the descriptor that it hands over; `gone` that the starter died.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        ended: Callable[[int, int], None],
        given: Callable[[str, int], None],
        gone: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._ended = ended
        self._given = given
        self._gone = gone
        self._orders: deque[bytes] = deque()
        self._asked: deque[Started] = deque()
        sock.setblocking(False)
        loop.watch(sock.fileno(), IN, self._ready)

    def define(self, number: int, steps: Iterable[Step]) -> None:
        """What the step `block` with this number stands for from now on. Raises OSError."""
        self._send(b"b" + bytes((number,)) + encode(steps))

    def prepare(self, steps: Iterable[Step]) -> None:
        """Has it do these steps at once, for itself and all copies to come; it ends where one fails.
        Raises OSError.
        """
        self._send(b"o" + encode(steps))

    def start(self, order: bytes, started: Started) -> None:
        """Gives a `start_order`. `started` hears the pid once there is one, or 0 and what failed. Raises
        OSError for an order that cannot be given.
        """
        self._send(order)
        self._asked.append(started)

    def kill(self, pid: int) -> None:
        """Ends what was started with this pid; its end is told as any other. None if it ended before."""
        self._send(b"k" + struct.pack("=i", pid))

    def _send(self, order: bytes) -> None:
        if len(order) > ORDER_BYTES:
            raise OSError(errno.E2BIG, f"{len(order)} bytes of steps are more than the starter takes")
        self._orders.append(order)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._orders:
                self._sock.send(self._orders[0])
                self._orders.popleft()
        except BlockingIOError:
            pass
        except OSError:
            return  # Its end is reported to `_receive`.
        self._loop.watch(self._sock.fileno(), IN | OUT if self._orders else IN, self._ready)

    def _ready(self, mask: int) -> None:
        if mask & OUT:
            self._flush()
        if mask & (IN | GONE):
            self._receive()

    def _receive(self) -> None:
        handed: list[int] = []
        try:
            answer, handed, _, _ = socket.recv_fds(self._sock, ANSWER_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        kind, body = answer[:1], answer[1:]
        if kind == b"s":
            self._asked.popleft()(struct.unpack("=i", body)[0], "")
        elif kind == b"f":
            self._asked.popleft()(0, os.fsdecode(body))
        elif kind == b"e":
            self._ended(*struct.unpack("=ii", body))
        elif kind == b"d":
            # None comes where this process could take no more: that sandbox cannot be copied then.
            if handed:
                os.set_inheritable(handed[0], False)
                self._given(os.fsdecode(body), handed[0])
        else:
            self._loop.unwatch(self._sock.fileno())
            self._gone()
