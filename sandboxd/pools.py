"""The pools of a daemon by name, and which of them a sandbox belongs to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from sandboxd import wire
from sandboxd.backends.base import Connection
from sandboxd.changes import Changes, paced
from sandboxd.clock import Clock
from sandboxd.errors import Draining, PoolNotFound, SandboxdError, SandboxNotFound
from sandboxd.pool import Pool
from sandboxd.sandbox import Sandbox
from sandboxd.types import POOL_PREFIX, SANDBOX_PREFIX, PoolStats
from sandboxd.v1 import sandbox_service_pb2 as pb

ALL_POOLS = f"{POOL_PREFIX}-"


class Pools:
    """The pools by name, and which of them a sandbox belongs to."""

    def __init__(self, clock: Clock) -> None:
        self.by_name: dict[str, Pool] = {}
        self.clock = clock
        self.changes = Changes()
        self.draining = False
        self.heard: Callable[[str, Connection], Connection] | None = None
        """What new pools put around the connections that callers are given."""
        # Removed from the settings, but not yet without leases.
        self._removed: dict[str, Pool] = {}
        # Removed and without leases: they destroy what they have, and one of the same name may be there.
        self._ending: list[Pool] = []

    def add(self, pool: Pool) -> None:
        """Serves a new one."""
        self.by_name[pool.name] = pool
        pool.heard = self.heard
        pool.changes.forward(self.changes.tell)

    def remove(self, name: str, why: SandboxdError) -> None:
        """Lets one take no new work; its leases go on. Who asks for it hears `why`."""
        pool = self._removed[name] = self.by_name.pop(name)
        pool.drain(why)
        pool.changes.close()

    def revived(self, name: str) -> Pool | None:
        """The pool of this name, also where it was removed and still has leases: it is then served again."""
        pool = self._removed.pop(name, None)
        if pool is not None:
            self.by_name[name] = pool
            pool.changes.reopen()
        return self.by_name.get(name)

    def is_removed(self, pool: Pool) -> bool:
        """True from `remove` on."""
        return self._removed.get(pool.name) is pool

    def ends(self, pool: Pool) -> None:
        """It begins to destroy what it has, and can no more be revived."""
        if self.is_removed(pool):
            self._ending.append(self._removed.pop(pool.name))

    def forget(self, pool: Pool) -> None:
        """It has ended."""
        if pool in self._ending:
            self._ending.remove(pool)

    def every(self) -> list[Pool]:
        """All that may have sandboxes, those that are served first."""
        return [*self.by_name.values(), *self._removed.values(), *self._ending]

    def sandbox_ids(self) -> set[str]:
        """The sandboxes of all of them, in any state; one that is being reset by both its names."""
        sandboxes = [sandbox for pool in self.every() for sandbox in pool.sandboxes()]
        return {name for sandbox in sandboxes for name in (sandbox.id, sandbox.was) if name}

    @property
    def idle(self) -> bool:
        """True when nobody holds a sandbox."""
        return all(pool.idle for pool in self.every())

    @property
    def quiet(self) -> bool:
        """True when nobody waits and no sandbox is on its way up or down."""
        return all(pool.quiet for pool in self.every())

    def drain(self) -> None:
        """Lets none of them take new work."""
        self.draining = True
        for pool in self.every():
            pool.drain()

    def named(self, name: str) -> Pool:
        """The pool of a resource name `pools/{pool}`. Raises PoolNotFound, InvalidRequest."""
        pool_id = wire.identifier(name, POOL_PREFIX)
        if pool_id not in self.by_name:
            known = ", ".join(sorted(self.by_name))
            raise PoolNotFound(f"no pool {pool_id!r}; this daemon has: {known}")
        return self.by_name[pool_id]

    def holding(self, name: str) -> tuple[Pool, str]:
        """The pool and the id of `sandboxes/{sandbox}`. Raises SandboxNotFound, InvalidRequest."""
        sandbox_id = wire.identifier(name, SANDBOX_PREFIX)
        name = sandbox_id.rpartition("-")[0]
        pool = self.by_name.get(name) or self._removed.get(name)
        if pool is None:
            raise SandboxNotFound(f"no leased sandbox {sandbox_id!r}")
        return pool, sandbox_id

    def watch(
        self, name: str, interval: float, heartbeat: float
    ) -> AsyncIterator[tuple[float, list[tuple[str, PoolStats]]]]:
        """The numbers of a pool, or of all for `pools/-`: at once, when they change, and as a heartbeat.

        With each comes its time in seconds since 1970. Ends with Draining or PoolNotFound.
        """
        if name == ALL_POOLS:
            return self._watch(self.changes, lambda: sorted(self.by_name.items()), interval, heartbeat)
        pool = self.named(name)
        return self._watch(pool.changes, lambda: [(pool.name, pool)], interval, heartbeat)

    async def _watch(
        self, changes: Changes, those: Callable[[], list[tuple[str, Pool]]], interval: float, heartbeat: float
    ) -> AsyncIterator[tuple[float, list[tuple[str, PoolStats]]]]:
        async for _ in paced(changes, self.clock, interval, heartbeat):
            yield self.clock.wall(), [(name, pool.stats()) for name, pool in those()]
        if self.changes.closed.is_set():
            raise Draining("the daemon is shutting down")
        raise PoolNotFound("the pool was removed from the settings")

    def stats(self) -> dict[str, PoolStats]:
        """The numbers of those that are served, by name."""
        return {name: pool.stats() for name, pool in self.by_name.items()}

    def close(self) -> None:
        """Ends all watching: the daemon is about to end."""
        self.changes.close()
        for pool in self.by_name.values():
            pool.changes.close()

    def encode(self, pool: Pool, sandbox: Sandbox) -> pb.Sandbox:
        """The wire form of a sandbox, its times on the calendar."""
        return wire.sandbox(pool.name, sandbox, self.calendar_offset)

    @property
    def calendar_offset(self) -> float:
        """What turns the pools' clock into seconds since 1970."""
        return self.clock.wall() - self.clock.now()
