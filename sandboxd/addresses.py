"""Where a daemon is reached: `unix:/path` or `host:port`, and what is wrong with words that are neither."""

from __future__ import annotations

import os

from sandboxd.errors import InvalidRequest

UNIX = "unix:"
# What the kernel's address of a unix socket holds, without its end.
PATH_BYTES_LIMIT = 107
PORT_LIMIT = 65_535
# What a daemon's own socket is called, in its state directory.
SOCKET_NAME = "sandboxd.sock"
# gRPC's other ways to name a server.
SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix-abstract:", "vsock:", "xds:")


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ValueError, which says what is wrong.

    A port out of range must not pass: the resolver takes it modulo 65536, and another port is served.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise ValueError("an address is unix:/path or host:port")
    if int(port[:6]) > PORT_LIMIT:
        raise ValueError(f"a port is a number from 0 to {PORT_LIMIT}")
    return host, int(port)


def is_plain(text: str) -> bool:
    """False for text with a zero byte in it, or that no UTF-8 stands for: file names that are none."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def check(address: str) -> None:
    """Raises InvalidRequest for what no daemon can be reached at; gRPC would speak of its parts instead."""
    if not is_plain(address):
        # gRPC would leave out what follows a zero byte.
        raise InvalidRequest(f"address {address!r}: it must be text in UTF-8, without a zero byte")
    if address.startswith(SCHEMES):
        return
    path = address.removeprefix(UNIX)
    try:
        if path == address:
            split(address)
        elif not path:
            raise ValueError("an address is unix:/path or host:port")
        elif len(os.fsencode(path.removeprefix("//"))) > PATH_BYTES_LIMIT:
            raise ValueError(f"the path of a unix socket has at most {PATH_BYTES_LIMIT} bytes")
    except ValueError as error:
        raise InvalidRequest(f"address {address!r}: {error}") from None
