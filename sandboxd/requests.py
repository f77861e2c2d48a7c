"""What the client asks of the daemon about commands: options by name, and the message made of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.wire import OUTPUT_PIECE_BYTES, duration

Word = str | bytes | os.PathLike[str]


class CommandOptions(TypedDict, total=False):
    """How a command is run, each option with the template's or no limit as its default.

    `timeout` in seconds counts from the program's start; `output_limit` in bytes bounds stdout and stderr
    together, and past it the command is killed; with `output_tail` it runs on, and so many of the last bytes
    of each stream are kept behind a cut; `terminal` is the size, in rows and columns, of one to run on.
    """

    timeout: float | None
    output_limit: int | None
    output_tail: int | None
    cwd: Word | None
    env: Mapping[str, str] | None
    terminal: tuple[int, int] | None


def as_bytes(word: Word) -> bytes:
    return os.fsencode(word)


def in_pieces(data: bytes) -> Iterator[bytes]:
    """The data in parts that fit into a message."""
    for begin in range(0, len(data), OUTPUT_PIECE_BYTES):
        yield data[begin : begin + OUTPUT_PIECE_BYTES]


def command(
    sandbox: str, argv: Sequence[Word], options: CommandOptions, stdin: bytes = b""
) -> pb.ExecCommandRequest:
    """The message that runs `argv` in the sandbox of this resource name."""
    timeout, cwd, size = options.get("timeout"), options.get("cwd"), options.get("terminal")
    return pb.ExecCommandRequest(
        name=sandbox,
        argv=[as_bytes(word) for word in argv],
        cwd=as_bytes(cwd) if cwd is not None else b"",
        env=[
            pb.EnvironmentVariable(name=as_bytes(name), value=as_bytes(value))
            for name, value in (options.get("env") or {}).items()
        ],
        stdin=stdin,
        timeout=None if timeout is None else duration(timeout),
        output_limit_bytes=options.get("output_limit") or 0,
        output_tail_bytes=options.get("output_tail") or 0,
        terminal=None if size is None else pb.TerminalSize(rows=size[0], columns=size[1]),
    )
