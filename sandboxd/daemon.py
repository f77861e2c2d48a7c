"""Puts the daemon together and takes it apart: state directory → backends → pools → gRPC server.

Order at the end, on SIGTERM or Ctrl-C: health says NOT_SERVING, the server takes no new calls and lets
those in flight go on for `drain_seconds`, the pools destroy their sandboxes, the backends sweep what is
left, the lock on the state directory is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sandboxd.backends import open_backend
from sandboxd.backends.base import Backend
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.config import Config, ConfigError
from sandboxd.doctor.facts import Facts
from sandboxd.doctor.reading import read
from sandboxd.doctor.serving import Carried
from sandboxd.journal import JournalFile
from sandboxd.lifetime import Tasks
from sandboxd.pool import Pool
from sandboxd.pool_service import PoolService
from sandboxd.pools import Pools
from sandboxd.recovery import reclaim, recover
from sandboxd.service import SandboxService
from sandboxd.slots import Slots
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
MESSAGE_LIMIT_BYTES = 4 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    # Two daemons on one TCP port would each get half of the calls; the second must fail instead.
    ("grpc.so_reuseport", 0),
)


@contextlib.contextmanager
def state_directory(path: Path) -> Iterator[Path]:
    """Makes the directory and locks it, so that two daemons never share one. Raises ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"state_dir {path} cannot be used: {error.strerror}; name another with --state-dir"
        ) from error
    try:
        _check_space(path)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(lock, 0)
        os.write(lock, b"%d\n" % os.getpid())
        yield path
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode().strip() or "?"
        raise ConfigError(
            f"state_dir {path} is in use by the daemon with pid {holder}; stop it or name another with"
            " --state-dir"
        ) from error
    finally:
        os.close(lock)


def _check_space(path: Path) -> None:
    """A disk without room would fail the first writes in every sandbox; say so before."""
    probe = path / ".space"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * 65536)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"state_dir {path} cannot be written: {error.strerror}; free some space or name another with"
            " --state-dir"
        ) from error
    finally:
        probe.unlink(missing_ok=True)


async def _open_backends(config: Config, stack: contextlib.AsyncExitStack) -> dict[str, Backend]:
    backends: dict[str, Backend] = {}
    for kind in sorted({pool.backend for pool in config.pools.values()}):
        backend = backends[kind] = open_backend(kind, config)
        # Pushed before `open`, so that an `open` that fails half-way is swept, too.
        stack.push_async_callback(backend.close)
        await backend.open()
    return backends


@contextlib.contextmanager
def _journal(state_dir: Path) -> Iterator[JournalFile]:
    """An orderly end leaves nothing that another daemon could take over."""
    journal = JournalFile(state_dir / "journal.sqlite3")
    try:
        with journal.open():
            yield journal
    except OSError as error:
        raise ConfigError(
            f"the journal {journal.path} cannot be used: {error.strerror or error}; free some space or name"
            " another place with --state-dir"
        ) from error
    journal.remove()


async def _open_pools(
    carried: Carried,
    backends: dict[str, Backend],
    journal: JournalFile,
    clock: Clock,
    stack: contextlib.AsyncExitStack,
) -> dict[str, Pool]:
    """Pools that go on where a killed daemon's ended, and the end of what is nobody's."""
    unclaimed = {kind: set(await backend.list_ids()) for kind, backend in backends.items()}
    slots = {kind: Slots(carried.config.pace(kind)) for kind in backends}
    pools = {}
    for name, settings in carried.config.pools.items():
        backend, own = backends[settings.backend], journal.pool(name)
        pool = Pool(
            name,
            backend=backend,
            template=settings.template(name),
            options=carried.options(name, slots[settings.backend]),
            clock=clock,
            journal=own,
        )
        left = unclaimed[settings.backend]
        left -= await recover(pool, backend, own, left)
        pools[name] = pool
    journal.keep_only(set(pools))
    reclaiming = await stack.enter_async_context(Tasks())
    for kind, left in unclaimed.items():
        task = reclaiming.create_task(reclaim(backends[kind], left, clock), name=f"reclaim {kind}")
        # What is left at the end is swept by the backend's own `close`.
        stack.callback(task.cancel)
    for pool in pools.values():
        await stack.enter_async_context(pool.run())
    return pools


def _server(pools: Pools) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    server = grpc.aio.server(options=OPTIONS)
    checks = health.aio.HealthServicer()
    pb_grpc.add_SandboxServiceServicer_to_server(SandboxService(pools), server)
    pb_grpc.add_PoolServiceServicer_to_server(PoolService(pools), server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, checks


def _listen(server: grpc.aio.Server, config: Config) -> list[str]:
    """Binds every address and returns them with the ports that were given. Raises ConfigError."""
    bound = []
    for address in config.addresses():
        path = address.removeprefix("unix:")
        try:
            if path != address:
                bound.append(_listen_on_socket(server, Path(path), own=Path(path).parent == config.state_dir))
            else:
                bound.append(_listen_on_port(server, address))
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"listen = {address!r}: {why}; name another with --listen") from error
    return bound


def _listen_on_socket(server: grpc.aio.Server, path: Path, *, own: bool) -> str:
    if own:
        # The lock on the state directory is ours, so a socket in it is a dead daemon's.
        path.unlink(missing_ok=True)
    if path.exists():
        raise FileExistsError(17, "the path exists; remove it")
    _try_to_bind(socket.AF_UNIX, str(path))
    path.unlink()
    server.add_insecure_port(f"unix:{path}")
    path.chmod(0o600)
    return f"unix:{path}"


def _listen_on_port(server: grpc.aio.Server, address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("an address is unix:/path or host:port")
    for family, _, _, _, target in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
        _try_to_bind(family, target)
    return f"{host}:{server.add_insecure_port(address)}"


def _try_to_bind(family: int, target: Any) -> None:
    """Raises OSError with the reason: gRPC says only that it failed, and prints lines of its own."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(target)


@contextlib.asynccontextmanager
async def running(
    config: Config, *, clock: Clock | None = None, host: Facts | None = None
) -> AsyncIterator[list[str]]:
    """A daemon inside this process, for as long as the block runs; yields the addresses it serves.

    `host` is what bounds its pools; this host as it is now when None. Raises ConfigError and
    BackendUnavailable before anything is left behind.
    """
    clock = clock or MonotonicClock()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(state_directory(config.state_dir))
        carried = Carried(config, await asyncio.to_thread(read) if host is None else host)
        backends = await _open_backends(config, stack)
        journal = stack.enter_context(_journal(config.state_dir))
        pools = await _open_pools(carried, backends, journal, clock, stack)
        served = Pools(pools, clock)
        server, checks = _server(served)
        addresses = _listen(server, config)
        await server.start()
        stack.push_async_callback(_stop, server, checks, served, config.drain_seconds)
        for service in ("", *SERVICES):
            await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
        yield addresses


async def _stop(
    server: grpc.aio.Server, checks: health.aio.HealthServicer, pools: Pools, grace: float
) -> None:
    await checks.enter_graceful_shutdown()
    for pool in pools.by_name.values():
        pool.drain()
    pools.close()
    await server.stop(grace)


def raise_limits() -> None:
    """A thousand sandboxes need a descriptor each and more while they are used, and their processes count
    against one user's: takes all that is allowed."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))


async def serve(config: Config, *, ready: Callable[[list[str]], None]) -> None:
    """Runs until SIGTERM or SIGINT; calls `ready` with the addresses once calls are taken."""
    raise_limits()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with running(config) as addresses:
            ready(addresses)
            await stop.wait()
            logger.info("stopping: draining for up to %g s", config.drain_seconds)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
