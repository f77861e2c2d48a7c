"""What the client asks of the daemon: options by name, and the message made of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf import duration_pb2

from sandboxd.errors import InvalidRequest
from sandboxd.types import POOL_PREFIX, QueuePosition
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.wire import LONGEST_SECONDS, OUTPUT_PIECE_BYTES, duration

Word = str | bytes | os.PathLike[str]
Message = TypeVar("Message")


# How often a caller that asked for it hears where it stands.
POSITION_INTERVAL_SECONDS = 1.0


class AcquireOptions(TypedDict, total=False):
    """How sandboxes are leased, each option with its default where it is not given.

    `ttl`: seconds without renewal after which the lease ends (the pool's). `timeout`: seconds to wait (no
    limit of the client's own). `labels` are attached to the lease. `request_id` makes the call safe to repeat
    (a new one). `priority`, from -10 to 10 (0): higher ones are served first. `tenant` (`default`): on whose
    account, see `[tenants]` in the settings. `on_wait` is called with the position in the queue, at once
    where the call must wait and then once a second; what it raises ends the call.
    """

    ttl: float | None
    timeout: float | None
    labels: Mapping[str, str] | None
    request_id: str | None
    priority: int
    tenant: str
    on_wait: Callable[[QueuePosition], object] | None


class CommandOptions(TypedDict, total=False):
    """How a command is run, each option with the template's or no limit as its default.

    `timeout` in seconds counts from the program's start; `output_limit` in bytes bounds stdout and stderr
    together, and past it the command is killed; with `output_tail` it runs on, and so many of the last bytes
    of each stream are kept behind a cut; `terminal` is the size, in rows and columns, of one to run on;
    `user` is who it runs as, `root` or `0:0` say, in pools with `users = true`.
    """

    timeout: float | None
    output_limit: int | None
    output_tail: int | None
    cwd: Word | None
    env: Mapping[str, str] | None
    terminal: tuple[int, int] | None
    user: str | None


def as_bytes(word: Word) -> bytes:
    """As the kernel takes it. Raises InvalidRequest for text that stands for no bytes; JSON may hold such."""
    try:
        return os.fsencode(word)
    except UnicodeEncodeError as error:
        found, text = error.object[error.start : error.end], error.object[:80]
        raise InvalidRequest(
            f"{found!r} at {error.start} of {text!r} is no character: leave it out, or give bytes"
        ) from None


def host_path(path: os.PathLike[str]) -> bytes:
    """Of a file of this host. Raises InvalidRequest for what can be no file's."""
    name = as_bytes(path)
    if b"\0" in name:
        raise InvalidRequest(f"path {name!r} must not contain a zero byte")
    return name


def message(kind: Callable[..., Message], **fields: Any) -> Message:
    """A message of these fields. Raises InvalidRequest for a value that no message can carry: a number with
    more bits than the field has, or text that is no Unicode.
    """
    try:
        return kind(**fields)
    except ValueError:
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except ValueError as error:
                raise InvalidRequest(f"{name} = {value!r}: {error}") from None
        raise


def span(value: float, field: str) -> duration_pb2.Duration:
    """So many seconds. Raises InvalidRequest where they are no number; the daemon says what it allows."""
    if not abs(value) <= LONGEST_SECONDS:
        raise InvalidRequest(f"{field} = {value:g} s must be at most {LONGEST_SECONDS:g} s")
    return duration(value)


def in_pieces(data: bytes) -> Iterator[bytes]:
    """The data in parts that fit into a message."""
    for begin in range(0, len(data), OUTPUT_PIECE_BYTES):
        yield data[begin : begin + OUTPUT_PIECE_BYTES]


def acquire(pool: str, options: AcquireOptions) -> pb.AcquireSandboxRequest:
    """The message that leases a sandbox."""
    return message(pb.AcquireSandboxRequest, **_acquire_fields(pool, options))


def acquire_gang(pool: str, count: int, options: AcquireOptions) -> pb.AcquireSandboxesRequest:
    """The message that leases several, all or none."""
    interval = None if options.get("on_wait") is None else duration(POSITION_INTERVAL_SECONDS)
    return message(
        pb.AcquireSandboxesRequest, count=count, position_interval=interval, **_acquire_fields(pool, options)
    )


def _acquire_fields(pool: str, options: AcquireOptions) -> dict[str, Any]:
    ttl = options.get("ttl")
    return {
        "pool": POOL_PREFIX + pool,
        "ttl": None if ttl is None else span(ttl, "ttl"),
        "labels": options.get("labels"),
        "request_id": options.get("request_id") or uuid.uuid4().hex,
        "priority": options.get("priority", 0),
        "tenant": options.get("tenant", ""),
    }


def command(
    sandbox: str, argv: Sequence[Word], options: CommandOptions, stdin: bytes = b""
) -> pb.ExecCommandRequest:
    """The message that runs `argv` in the sandbox of this resource name."""
    if isinstance(argv, str | bytes):
        raise InvalidRequest(
            f"argv = {argv!r} is one word: give a list of words, or ['sh', '-c', {argv!r}] for a line of"
            " shell"
        )
    timeout, cwd, size = options.get("timeout"), options.get("cwd"), options.get("terminal")
    return message(
        pb.ExecCommandRequest,
        name=sandbox,
        argv=[as_bytes(word) for word in argv],
        cwd=as_bytes(cwd) if cwd is not None else b"",
        env=[
            pb.EnvironmentVariable(name=as_bytes(name), value=as_bytes(value))
            for name, value in (options.get("env") or {}).items()
        ],
        stdin=stdin,
        timeout=None if timeout is None else span(timeout, "timeout"),
        output_limit_bytes=options.get("output_limit") or 0,
        output_tail_bytes=options.get("output_tail") or 0,
        terminal=None if size is None else message(pb.TerminalSize, rows=size[0], columns=size[1]),
        user=options.get("user") or "",
    )
