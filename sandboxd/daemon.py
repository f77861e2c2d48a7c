"""Puts the daemon together and takes it apart: state directory → backends → pools → gRPC server.

Order at the end, on SIGTERM or Ctrl-C: health says NOT_SERVING and the pools refuse new work; leases may go
on for `drain_seconds`, those that are left are reclaimed; the server ends, the pools destroy their sandboxes,
the backends sweep what is left, the lock on the state directory is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sandboxd import collecting, keepalive
from sandboxd.backend_set import BackendSet
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.config import Config, ConfigError
from sandboxd.doctor.facts import Facts
from sandboxd.doctor.reading import read
from sandboxd.errors import InvalidRequest, SandboxdError
from sandboxd.gate import Gate
from sandboxd.health_checks import HealthChecks
from sandboxd.heap import keep_freed
from sandboxd.journal_file import JournalFile
from sandboxd.lifetime import Tasks
from sandboxd.listening import listen
from sandboxd.pool_service import PoolService
from sandboxd.pools import Pools
from sandboxd.priority import come_first
from sandboxd.service import SandboxService
from sandboxd.telemetry.settings import Wanted
from sandboxd.types import Reloaded
from sandboxd.upkeep import Surroundings, Upkeep
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc
from sandboxd.web.page import page

if TYPE_CHECKING:
    from sandboxd.telemetry.setup import Recording

logger = logging.getLogger(__name__)

SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
MESSAGE_LIMIT_BYTES = 4 << 20
# Once no lease is left, calls in flight have so long to hear what became of theirs.
CALLS_SECONDS = 2.0
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
        _take(lock, path)
        yield path
    finally:
        os.close(lock)


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode().strip() or "?"
        raise ConfigError(
            f"state_dir {path} is in use by the daemon with pid {holder}; stop it or name another with"
            " --state-dir"
        ) from error
    os.truncate(lock, 0)
    os.write(lock, b"%d\n" % os.getpid())


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


@contextlib.contextmanager
def _journal(state_dir: Path, clock: Clock) -> Iterator[JournalFile]:
    """An orderly end leaves nothing that another daemon could take over."""
    journal = JournalFile(state_dir / "journal.sqlite3", clock)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(journal.open())
        except OSError as error:
            raise ConfigError(
                f"the journal {journal.path} cannot be used: {error.strerror or error}; free some space or"
                " name another place with --state-dir"
            ) from error
        # Outside of it: what the daemon meets later is not the journal's fault.
        yield journal
    journal.remove()


Observe = Callable[[grpc.GenericRpcHandler], grpc.GenericRpcHandler]


def _server(
    pools: Pools, reload: Callable[[], Awaitable[Reloaded]], observe: Observe | None, silence: float
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    server = grpc.aio.server(options=(*OPTIONS, *keepalive.of_server(silence)))
    checks = health.aio.HealthServicer()
    taken, gate = cast("grpc.aio.Server", _OneQueue(server, observe)), Gate()
    pb_grpc.add_SandboxServiceServicer_to_server(SandboxService(pools, gate), taken)
    pb_grpc.add_PoolServiceServicer_to_server(PoolService(pools, reload, gate), taken)
    # With a queue of its own: whoever asks for health does not wait behind a thousand other calls.
    asked = cast("grpc.aio.Server", _OneQueue(server, None, own=("Check",)))
    health_pb2_grpc.add_HealthServicer_to_server(checks, asked)
    names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, taken)
    return server, checks


class _OneQueue:
    """A server to which services are added without a queue for each of their methods: gRPC's asyncio server
    looks at all of its queues for each call that comes, which costs more than what they are for. The methods
    `own` have one each. `observe` puts something around the handlers.
    """

    def __init__(self, server: grpc.aio.Server, observe: Observe | None, own: Iterable[str] = ()) -> None:
        self._server, self._observe, self._own = server, observe, tuple(own)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """As the server's."""
        observe = self._observe
        self._server.add_generic_rpc_handlers(
            tuple(handlers) if observe is None else tuple(map(observe, handlers))
        )

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """The generic handlers serve all others."""
        own = {name: handlers[name] for name in self._own}
        if own:
            self._server.add_registered_method_handlers(service, own)


class Control:
    """What the process of a daemon may tell it while it runs.

    `reread` reads the settings again; None where there is no file. Setting `again` has that done, setting
    `hurry` ends a drain at once. `applied` is called with settings that hold from then on. `page` is where
    the live page is, once the daemon serves; None where there is none.
    """

    def __init__(
        self,
        reread: Callable[[], Config] | None = None,
        applied: Callable[[Config], None] = lambda _: None,
    ) -> None:
        self.reread = reread
        self.applied = applied
        self.again = asyncio.Event()
        self.hurry = asyncio.Event()
        self.page: str | None = None


@contextlib.asynccontextmanager
async def running(
    config: Config,
    *,
    clock: Clock | None = None,
    host: Facts | None = None,
    control: Control | None = None,
    telemetry: Wanted | None = None,
) -> AsyncIterator[list[str]]:
    """A daemon inside this process, for as long as the block runs; yields the addresses it serves.

    `host` is what bounds its pools; this host as it is now when None. `telemetry` says what it tells of its
    work, and whom; nothing when None. Raises ConfigError and
    BackendUnavailable before anything is left behind but what a killed daemon had left: that stays for the
    next.
    """
    control = control or Control()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(state_directory(config.state_dir))
        recording = await _telemetry(telemetry, stack)
        facts = await asyncio.to_thread(read) if host is None else host
        clock = clock or MonotonicClock()
        backends = await stack.enter_async_context(BackendSet(config, clock))
        # Before the journal: a daemon without its backends leaves none.
        await backends.open_for(config)
        journal = stack.enter_context(_journal(config.state_dir, clock))
        around = Surroundings(backends, journal, facts, clock)
        upkeep = Upkeep(config, around)
        reloading = Reloading(upkeep, control)
        observe = None if recording is None else recording.calls.observed
        server, servicer = _server(upkeep.pools, reloading.reload, observe, config.keepalive_seconds)
        if recording is not None:
            recording.watch(upkeep.pools.stats)
        checks = HealthChecks(servicer, upkeep)
        bound = stack.enter_context(contextlib.ExitStack())
        addresses = listen(server, config, bound)
        control.page = await stack.enter_async_context(page(config, upkeep.pools))
        # Callers wait from now on; an address that is taken has ended no lease.
        await stack.enter_async_context(upkeep.run())
        await server.start()
        bound.pop_all()
        stack.push_async_callback(_stop, server, servicer, upkeep, control.hurry)
        tasks = await stack.enter_async_context(Tasks())
        stack.callback(tasks.create_task(reloading.whenever_told(), name="reload").cancel)
        for service in ("", *SERVICES):
            await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        await checks.tell()
        stack.callback(tasks.create_task(checks.run(), name="health").cancel)
        tidying = collecting.collect_when_quiet(clock, lambda: upkeep.pools.quiet)
        stack.callback(tasks.create_task(tidying, name="collections").cancel)
        yield addresses


async def _telemetry(wanted: Wanted | None, stack: contextlib.AsyncExitStack) -> Recording | None:
    if wanted is None or not wanted.anything:
        return None
    # Imported late: half a second and 20 MB that a daemon without telemetry does not pay.
    from sandboxd.telemetry.setup import recorded

    return await stack.enter_async_context(recorded(wanted))


class Reloading:
    """Reads the settings of a daemon again, when an operator or a client says so."""

    def __init__(self, upkeep: Upkeep, control: Control) -> None:
        self._upkeep = upkeep
        self._control = control

    async def reload(self) -> Reloaded:
        """See `Upkeep.reload`. Raises InvalidRequest also where there is no file."""
        if self._control.reread is None:
            raise InvalidRequest(
                "this daemon has no settings file to read again: start it with --config FILE"
            )
        told = await self._upkeep.reload(self._control.reread)
        self._control.applied(self._upkeep.config)
        return told

    async def whenever_told(self) -> None:
        """Never returns; what fails is one line in the log."""
        while True:
            await self._control.again.wait()
            self._control.again.clear()
            try:
                await self.reload()
            except SandboxdError as error:
                logger.error("the settings were not read again: %s", error.message)


async def _stop(
    server: grpc.aio.Server, checks: health.aio.HealthServicer, upkeep: Upkeep, hurry: asyncio.Event
) -> None:
    await checks.enter_graceful_shutdown()
    await upkeep.drain(hurry)
    upkeep.pools.close()
    await server.stop(CALLS_SECONDS)


def raise_limits() -> None:
    """A thousand sandboxes need a descriptor each and more while they are used, and their processes count
    against one user's: takes all that is allowed."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))


async def serve(
    config: Config,
    control: Control,
    *,
    ready: Callable[[list[str]], None],
    telemetry: Wanted | None = None,
) -> None:
    """Runs until SIGTERM or SIGINT, the second of which ends it at once; SIGHUP has the settings read again,
    unless it says that the terminal has gone.

    Calls `ready` with the addresses once calls are taken.
    """
    raise_limits()
    keep_freed()
    come_first()
    stop, on_terminal = asyncio.Event(), _has_terminal()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if stop.is_set():
            control.hurry.set()
        stop.set()

    def hang_up() -> None:
        if on_terminal and not _has_terminal():
            end()
        else:
            control.again.set()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: hang_up}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        async with running(config, control=control, telemetry=telemetry) as addresses:
            with collecting.on_demand():
                ready(addresses)
                await stop.wait()
            logger.info("stopping: leases may go on for a time; a second signal ends them at once")
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _has_terminal() -> bool:
    """False also when it has hung up."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
