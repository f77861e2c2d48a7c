"""Reads the requests that the daemon packs for a guest, as native/wire.c does: in Python only tests do."""

from __future__ import annotations

import struct

from sandboxd.guest.wire import (
    EXEC_FIELDS,
    HAS_STDIN,
    HAS_USER,
    NAMED_FIELDS,
    ExecRequest,
    Malformed,
    NamedRequest,
)


def unpack_exec(payload: bytes) -> ExecRequest:
    """Raises Malformed."""
    try:
        fields = EXEC_FIELDS.unpack_from(payload)
    except struct.error as error:
        raise Malformed("an exec request is too short") from error
    timeout, output_limit, output_tail, flags, rows, columns, argc, envc = fields
    strings = _strings(payload, EXEC_FIELDS.size, 1 + bool(flags & HAS_USER) + argc + 2 * envc)
    user = strings.pop(1) if flags & HAS_USER else b""
    if not argc:
        raise Malformed("an exec request without argv")
    env = [(strings[n], strings[n + 1]) for n in range(1 + argc, len(strings), 2)]
    request = ExecRequest(strings[1 : 1 + argc], strings[0], env)
    request.timeout, request.output_limit, request.user = timeout, output_limit, user
    request.has_stdin = bool(flags & HAS_STDIN)
    request.output_tail, request.terminal = output_tail, (rows, columns)
    return request


def unpack_named(payload: bytes) -> NamedRequest:
    """Raises Malformed."""
    try:
        bond, id_length, stdin_length = NAMED_FIELDS.unpack_from(payload)
    except struct.error as error:
        raise Malformed("a start request is too short") from error
    begin = NAMED_FIELDS.size + id_length
    end = begin + stdin_length
    command = unpack_exec(payload[end:])
    return NamedRequest(payload[NAMED_FIELDS.size : begin], command, payload[begin:end], bond)


def _strings(data: bytes, start: int, count: int) -> list[bytes]:
    """The `count` byte strings that fill `data` from `start`. Raises Malformed."""
    strings = []
    for _ in range(count):
        if start + 4 > len(data):
            raise Malformed("a request ends early")
        (length,) = struct.unpack_from("!I", data, start)
        start += 4
        if start + length > len(data):
            raise Malformed("a request ends early")
        strings.append(data[start : start + length])
        start += length
    if start != len(data):
        raise Malformed(f"{len(data) - start} bytes too many in a request")
    return strings
