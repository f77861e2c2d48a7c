"""The starter without a launcher: carries out steps for a test."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from sandboxd.backends.native import guest_program
from sandboxd.backends.steps import Step, encode

from .guest_kit import OPTIONS


class Bench:
    """A starter that works in `directory` and inherits descriptors; a context manager, which ends it."""

    def __init__(
        self, directory: Path | str = "/", inherited: Sequence[int] = (), program: Path | None = None
    ) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        with theirs:
            numbers = [str(number) for number in (os.getpid(), theirs.fileno(), *inherited)]
            self.process = subprocess.Popen(
                ["sandboxd-guest", "starter", *numbers],
                executable=program or guest_program(),
                pass_fds=[theirs.fileno(), *inherited],
                cwd=directory,
                env=OPTIONS,
            )

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        assert self.process.wait(20) == 0

    def start(self, ours: bytes, theirs: bytes = b"") -> None:
        """Orders a sandbox; see native/starter.c."""
        self.sock.send(b"s" + struct.pack("=I", len(ours)) + ours + theirs)

    def answer(self) -> tuple[str, bytes]:
        """The kind of the next one, and what it brings."""
        data = self.sock.recv(4096)
        return data[:1].decode(), data[1:]

    def failure(self, steps: Iterable[Step]) -> str:
        """What a list of steps failed at, which must end it."""
        self.start(encode(steps))
        kind, body = self.answer()
        assert kind == "f", (kind, body)
        return body.decode()
