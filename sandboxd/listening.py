"""Where the daemon takes calls: binds sockets and ports, with a reason in words where that fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from sandboxd import addresses
from sandboxd.config import Config, ConfigError


class Server(Protocol):
    """What is needed of a gRPC server."""

    def add_insecure_port(self, address: str) -> int: ...


def listen(server: Server, config: Config, bound: contextlib.ExitStack) -> list[str]:
    """Binds every address and returns them with the ports that were given. Raises ConfigError.

    `bound` removes the sockets, which a server that was never started leaves behind.
    """
    given = []
    for address in config.addresses():
        path = address.removeprefix("unix:")
        try:
            if path != address:
                given.append(_listen_on_socket(server, Path(path), own=Path(path).parent == config.state_dir))
                bound.callback(Path(path).unlink, missing_ok=True)
            else:
                given.append(_listen_on_port(server, address))
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"listen = {address!r}: {why}; name another with --listen") from error
    return given


def _listen_on_socket(server: Server, path: Path, *, own: bool) -> str:
    if own:
        # The lock on the state directory is ours, so a socket in it is a dead daemon's.
        path.unlink(missing_ok=True)
    with _alone_in(path.parent):
        if path.exists():
            _remove_dead(path)
        _try_to_bind(socket.AF_UNIX, str(path))
        path.unlink()
        server.add_insecure_port(f"unix:{path}")
    path.chmod(0o600)
    return f"unix:{path}"


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """No other daemon looks at this directory's sockets meanwhile: each would take the other's for dead."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _remove_dead(path: Path) -> None:
    """Removes the socket of a daemon that was killed. Raises FileExistsError where it is anything else."""
    if not path.is_socket():
        raise FileExistsError(errno.EEXIST, "the path exists and is no socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise FileExistsError(errno.EEXIST, "another program serves there; stop it")
    path.unlink()


def _listen_on_port(server: Server, address: str) -> str:
    host, port = addresses.split(address)
    for family, _, _, _, target in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        _try_to_bind(family, target)
    return f"{host}:{server.add_insecure_port(address)}"


def _try_to_bind(family: int, target: Any) -> None:
    """Raises OSError with the reason: gRPC says only that it failed, and prints lines of its own."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(target)
