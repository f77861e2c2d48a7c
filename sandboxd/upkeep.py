"""Begins, changes and ends the pools of a daemon: when it starts, when its settings change, when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass

from sandboxd.backend_set import BackendSet
from sandboxd.clock import Clock
from sandboxd.config import Config, ConfigError, PoolConfig
from sandboxd.config_changes import check_changeable
from sandboxd.doctor.facts import Facts
from sandboxd.doctor.serving import Carried, without
from sandboxd.errors import Draining, InvalidRequest, PoolNotFound
from sandboxd.journal_file import JournalFile
from sandboxd.lifetime import Tasks, first_of
from sandboxd.pool import Pool
from sandboxd.pools import Pools
from sandboxd.recovery import branches_in_use, reclaim, recover
from sandboxd.slots import Slots
from sandboxd.strays import sweep
from sandboxd.types import Reloaded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the pools of a daemon live on."""

    backends: BackendSet
    journal: JournalFile
    facts: Facts
    clock: Clock


class Upkeep:
    """Of one daemon; `pools` are those that it serves."""

    def __init__(self, config: Config, surroundings: Surroundings) -> None:
        self.config = config
        self.pools = Pools(surroundings.clock)
        self.backends = surroundings.backends
        self._around = surroundings
        self._facts = surroundings.facts
        self._slots: dict[str, Slots] = {}
        self._ending = False
        self._watched: set[str] = set()
        self._sweeps: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Pools]:
        """Goes on where a killed daemon's pools ended, and destroys what is nobody's. All pools end with it.

        The backends of its settings must be open. Raises BackendUnavailable.
        """
        unclaimed = {kind: set(await one.backend.list_ids()) for kind, one in self.backends}
        branches = {kind: set(await one.backend.list_branches()) for kind, one in self.backends}
        self._facts = without(self._facts, {kind: len(ids) for kind, ids in unclaimed.items()})
        pools = await self._recovered(unclaimed)
        in_use = branches_in_use(pools)
        # From now on the end of this daemon is the end of all that it has.
        self.backends.own = True
        async with Tasks() as self._tasks, Tasks() as reclaiming:
            clock = self._around.clock
            self._sweeping = reclaiming
            for kind, left in unclaimed.items():
                reclaiming_all = reclaim(self.backends[kind].backend, left, clock, branches[kind] - in_use)
                self._sweep(reclaiming_all, f"reclaim {kind}")
            try:
                self._watch_backends()
                await self._begin(pools)
                # One may end long before this block does.
                pools.clear()
                yield self.pools
            finally:
                # What is left at the end is swept by the backend's own `close`.
                for task in self._sweeps:
                    task.cancel()
                self._ending = True
                self.pools.changes.tell()

    async def _recovered(self, unclaimed: dict[str, set[str]]) -> list[Pool]:
        """The pools of the settings with what killed ones left of theirs, which `unclaimed` loses."""
        carried = Carried(self.config, self._facts)
        pools = [self._make(name, carried) for name in self.config.pools]
        for pool, (name, settings) in zip(pools, self.config.pools.items(), strict=True):
            backend, own = self.backends[settings.backend].backend, self._around.journal.pool(name)
            unclaimed[settings.backend] -= await recover(pool, backend, own, unclaimed[settings.backend])
        self._around.journal.keep_only(set(self.config.pools))
        _warn_of_open_networks(self.config.pools, {})
        return pools

    def _slots_of(self, kind: str, config: Config) -> Slots:
        """Those that all pools of a backend share, within the bounds that the settings say now."""
        pace = config.pace(kind)
        slots = self._slots.setdefault(kind, Slots(pace))
        slots.pace.rebound(pace.floor, pace.ceiling)
        return slots

    def _watch_backends(self) -> None:
        for kind, one in self.backends:
            if kind in self._watched:
                continue
            self._watched.add(kind)
            one.availability.changes.forward(self.pools.changes.tell)
            sweeping = sweep(one.backend, one.availability, self.pools.sandbox_ids, self._around.clock)
            self._sweep(sweeping, f"sweep {kind}")

    def _sweep(self, work: Coroutine[None, None, None], name: str) -> None:
        self._sweeps.append(self._sweeping.create_task(work, name=name))

    def _make(self, name: str, carried: Carried) -> Pool:
        settings = carried.config.pools[name]
        one = self.backends[settings.backend]
        pool = Pool(
            name,
            backend=one.backend,
            template=settings.template(name),
            options=carried.options(name, self._slots_of(settings.backend, carried.config)),
            clock=self._around.clock,
            journal=self._around.journal.pool(name),
        )
        pool.depend_on(one.availability)
        return pool

    async def _begin(self, pools: list[Pool]) -> None:
        """Returns when all of them run."""
        begun = [asyncio.Event() for _ in pools]
        for pool, event in zip(pools, begun, strict=True):
            self._tasks.create_task(self._live(pool, event), name=f"pool {pool.name}")
        for event in begun:
            await event.wait()

    async def _live(self, pool: Pool, begun: asyncio.Event) -> None:
        """Runs a pool until the daemon ends, or until it was removed and its last lease has ended."""
        async with pool.run():
            self.pools.add(pool)
            begun.set()
            await self.pools.changes.until(
                lambda: self._ending or (self.pools.is_removed(pool) and pool.idle)
            )
            # At once: whoever reads the settings now makes a new one.
            self.pools.ends(pool)
        self.pools.forget(pool)

    async def reload(self, reread: Callable[[], Config]) -> Reloaded:
        """Applies what the settings say now. Leases go on; after an error all is as it was.

        New pools start. Removed ones take no new work, and end with their last lease. Changed bounds hold at
        once, and a changed template for new sandboxes: those that are ready are replaced. Raises
        InvalidRequest with the fault in the settings, BackendUnavailable where a pool's backend cannot be
        opened, Draining.
        """
        async with self._reloading:
            try:
                config = await asyncio.to_thread(reread)
                check_changeable(self.config, config)
            except ConfigError as error:
                raise InvalidRequest(f"nothing was changed: {error}") from error
            await self.backends.open_for(config)
            self._watch_backends()
            if self._ending or self.pools.draining:
                raise Draining("the daemon is shutting down")
            told, new = self._apply(config)
            await self._begin(new)
            logger.info("the settings were read again: %s", told)
            return told

    def _apply(self, config: Config) -> tuple[Reloaded, list[Pool]]:
        """Nothing in here waits or fails: it happens at once or not at all. Also returns what must begin."""
        before, self.config = self.config.pools, config
        carried = Carried(config, self._facts)
        told = Reloaded(
            added=tuple(sorted(config.pools.keys() - before.keys())),
            removed=tuple(sorted(before.keys() - config.pools.keys())),
            changed=tuple(
                sorted(name for name in before.keys() & config.pools if before[name] != config.pools[name])
            ),
        )
        _warn_of_open_networks(config.pools, before)
        for name in told.removed:
            self.pools.remove(name, PoolNotFound(f"pool {name!r} was removed from the settings"))
        new = []
        for name, settings in config.pools.items():
            pool = self.pools.revived(name)
            if pool is None:
                new.append(self._make(name, carried))
            else:
                slots = self._slots_of(settings.backend, config)
                pool.reconfigure(settings.template(name), carried.options(name, slots))
        self.pools.changes.tell()
        return told, new

    async def drain(self, hurry: asyncio.Event) -> None:
        """Refuses new work and waits for the leases to end, at most `drain_seconds` or until `hurry` is set.

        The holders of those that are left hear SANDBOX_LOST.
        """
        self.pools.drain()
        clock, seconds = self._around.clock, self.config.drain_seconds
        deadline = clock.now() + seconds
        with self.pools.changes.watched() as changed:
            while not self.pools.idle and clock.now() < deadline and not hurry.is_set():
                changed.clear()
                await first_of(changed.wait(), hurry.wait(), clock.sleep(deadline - clock.now()))
        left = sum(pool.reclaim() for pool in self.pools.every())
        if left:
            when = "when it was told to end at once" if hurry.is_set() else f"after {seconds:g} s"
            logger.warning("%d leases had not ended %s, and were reclaimed", left, when)


def _warn_of_open_networks(pools: Mapping[str, PoolConfig], before: Mapping[str, PoolConfig]) -> None:
    """Once for each pool whose sandboxes were not on the host's network `before`."""
    for name, settings in pools.items():
        if settings.network == "host" and (name not in before or before[name].network != "host"):
            logger.warning(
                'pool %s: network = "host" takes the isolation of the network away: its sandboxes reach'
                " whatever listens on this host; leave the key out unless they must",
                name,
            )
