"""Several generators that look like one: only those with the current weights draw, and dead ones come back.

A replica is STARTING until it serves the current version, READY while it does, BEHIND when an update passed
it by, and GONE when it could not be started. Only READY ones get requests. A request whose replica dies is
drawn again elsewhere, or on the same one once it is back: the dialogue so far is the caller's, so an episode
goes on from its last whole turn, and of the turn that was cut off nobody has heard a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import tenacity

from rl.generator import (
    Generation,
    Generator,
    GeneratorDead,
    GeneratorStats,
    GeneratorUnavailable,
    Sampling,
    UpdateFailed,
)
from rl.liveness import LIVENESS, Liveness, proof, until_hung
from rl.replica import Life, Open, Replica, State
from rl.types import TokenIds

Announce = Callable[[Sequence[Generator], int], None]
"""Told which generators are about to be updated side by side, and to which version."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to bear with a replica.

    `starts`: how often in a row it may fail to come up, or die before it has finished one request, until it
    is given up. `pause_seconds`: before the second start, twice as long before each further one, at most
    `longest_pause_seconds`. `update_seconds`: for one update of the weights; a replica that takes longer is
    started again. `draws`: how often one request is drawn; one that kills whoever draws it must end.
    `liveness`: when one that draws nothing is started again.
    """

    starts: int = 3
    pause_seconds: float = 1.0
    longest_pause_seconds: float = 30.0
    update_seconds: float = 120.0
    update_attempts: int = 3
    draws: int = 3
    liveness: Liveness = LIVENESS


PATIENCE = Patience()


class Replicas:
    """A Generator made of others. Made by `open_replicas`."""

    def __init__(
        self, opens: Sequence[Open], patience: Patience, clock: Callable[[], float], announce: Announce | None
    ) -> None:
        self._replicas = [Replica(number, open_) for number, open_ in enumerate(opens)]
        self._patience = patience
        self._clock = clock
        self._announce = announce
        self._version = 0
        self._path: Path | None = None
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._fault: BaseException | None = None
        self._updates = self._running = self._restarts = 0
        self._busy_seconds = self._busy_since = 0.0
        self._past: list[GeneratorStats] = []

    @property
    def version(self) -> int:
        return self._version

    @property
    def states(self) -> list[State]:
        """Of each replica."""
        return [replica.state for replica in self._replicas]

    @property
    def restarts(self) -> int:
        """Replicas that were started again so far."""
        return self._restarts

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        """Draws on the READY replica with the fewest requests, waiting for one. Raises GeneratorDead when all
        are GONE, GeneratorUnavailable for a request under which one replica after the other died.
        """
        for _ in range(self._patience.draws):
            replica, life = await self._take()
            self._begin(replica)
            try:
                return await life.run(life.generator.generate(context_ids, sampling))
            except GeneratorDead as death:
                replica.lose(life, str(death))
                last = str(death)
            finally:
                self._end(replica)
        raise GeneratorUnavailable(f"given up after {self._patience.draws} generators died of it: {last}")

    async def update_weights(self, path: Path, version: int) -> None:
        """Updates all that are READY, side by side. Those that it passes by get no request until they have
        caught up. Raises UpdateFailed when not one took the weights, GeneratorDead when all are GONE.
        """
        async with self._updating:
            if version <= self._version:
                raise UpdateFailed(f"weights {version} are not newer than weights {self._version}")
            await self._take()
            ready = self._ready()
            if self._announce is not None:
                self._announce([life.generator for _, life in ready], version)
            outcomes = await asyncio.gather(
                *(self._update(replica, life, path, version) for replica, life in ready)
            )
            if not any(outcome is None for outcome in outcomes):
                first = next(outcome for outcome in outcomes if outcome is not None)
                raise UpdateFailed(f"no generator took weights {version}: {first}")
            self._version, self._path = version, path
            self._updates += 1
            for replica, life in self._ready():
                if life.generator.version != version:
                    replica.fall_behind()
            self._tell()

    def stats(self) -> GeneratorStats:
        """Requests and tokens of all replicas, also of those that have died, who hold no cache and no queue
        any more; `busy_seconds` while any ran."""
        living = [each.life.generator.stats() for each in self._replicas if each.life is not None]
        names = [field.name for field in fields(GeneratorStats)]
        sums = {name: sum(getattr(each, name) for each in [*self._past, *living]) for name in names}
        busy = self._busy_seconds + (self._clock() - self._busy_since if self._running else 0.0)
        fullest = max((each.kv_cache_usage for each in living), default=0.0)
        queued = sum(each.queued for each in living)
        own = {"running": self._running, "updates": self._updates, "busy_seconds": busy}
        return GeneratorStats(**sums | own | {"kv_cache_usage": fullest, "queued": queued})

    def _ready(self) -> list[tuple[Replica, Life]]:
        return [
            (replica, replica.life)
            for replica in self._replicas
            if replica.state is State.READY and replica.life is not None
        ]

    async def _take(self) -> tuple[Replica, Life]:
        """The READY replica with the fewest requests, as soon as there is one."""
        while True:
            changed = self._changed
            if self._fault is not None:
                raise self._fault
            ready = self._ready()
            if ready:
                return min(ready, key=lambda each: each[0].running)
            if all(replica.state is State.GONE for replica in self._replicas):
                last = self._replicas[-1].last_death
                raise GeneratorDead(f"all generators are gone; the last one: {last}")
            await changed.wait()

    async def _update(self, replica: Replica, life: Life, path: Path, version: int) -> str | None:
        """None, or why the replica does not serve the version."""
        replica.updating += 1
        try:
            async with asyncio.timeout(self._patience.update_seconds):
                await life.run(life.generator.update_weights(path, version))
        except UpdateFailed as error:
            return str(error)
        except GeneratorDead as death:
            replica.lose(life, str(death))
            return str(death)
        except TimeoutError:
            late = f"an update took longer than {self._patience.update_seconds:g} s"
            replica.lose(life, late)
            return late
        finally:
            replica.updating -= 1
        return None

    async def _keep(self, replica: Replica) -> None:
        """Starts a replica, tends it, and starts it again whenever it dies, until it is given up."""
        while True:
            try:
                async with replica.open() as generator:
                    await self._live(replica, Life(generator))
            except GeneratorDead as death:
                replica.last_death = str(death)
            replica.failures += 1
            if replica.failures >= self._patience.starts:
                replica.state = State.GONE
                self._tell()
                return
            self._restarts += 1
            pause = self._patience.pause_seconds * 2 ** (replica.failures - 1)
            await asyncio.sleep(min(pause, self._patience.longest_pause_seconds))

    async def _live(self, replica: Replica, life: Life) -> None:
        """One life of a replica. Raises GeneratorDead at its end."""
        replica.life = life
        watching = asyncio.create_task(self._watch(replica, life), name="watch")
        watching.add_done_callback(self.hear)
        try:
            if replica.hung:
                await proof(life, self._patience.liveness)
                replica.hung = False
            await self._tend(replica, life)
        finally:
            watching.cancel()
            replica.lose(life, f"generator {replica.number} is being closed")
            replica.life = None
            try:
                await asyncio.wait((watching,))
            finally:
                try:
                    await life.over()
                finally:
                    self._remember(replica, life.generator.stats())

    def _remember(self, replica: Replica, stats: GeneratorStats) -> None:
        self._past.append(stats)
        if stats.finished:
            replica.failures = 0

    async def _watch(self, replica: Replica, life: Life) -> None:
        """Gives its generator up once it hangs."""
        why = await until_hung(replica, life, self._patience.liveness)
        replica.hung = True
        replica.lose(life, why)

    async def _tend(self, replica: Replica, life: Life) -> None:
        """Brings it up to the current weights, now and when it has fallen behind. Raises GeneratorDead."""
        while True:
            replica.news.clear()
            await self._catch_up(life)
            if life.generator.version == self._version:
                replica.state = State.READY
                self._tell()
                await life.run(replica.news.wait())

    async def _catch_up(self, life: Life) -> None:
        """Ends without waiting once the versions are equal; GeneratorDead also when they will not be."""
        generator = life.generator
        try:
            async for attempt in tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(self._patience.update_attempts),
                wait=tenacity.wait_random_exponential(self._patience.pause_seconds / 4, max=2.0),
                retry=tenacity.retry_if_exception_type(UpdateFailed),
                reraise=True,
            ):
                with attempt:
                    while generator.version != self._version:
                        if self._path is None:
                            raise UpdateFailed(
                                f"it serves weights {generator.version} and the run begins at "
                                f"{self._version}: start it anew"
                            )
                        async with asyncio.timeout(self._patience.update_seconds):
                            await life.run(generator.update_weights(self._path, self._version))
        except (UpdateFailed, TimeoutError) as error:
            raise GeneratorDead(f"it did not get the current weights: {error or 'out of time'}") from error

    def _begin(self, replica: Replica) -> None:
        if not self._running:
            self._busy_since = self._clock()
        self._running += 1
        replica.running += 1

    def _end(self, replica: Replica) -> None:
        replica.running -= 1
        replica.ended += 1
        self._running -= 1
        if not self._running:
            self._busy_seconds += self._clock() - self._busy_since

    def hear(self, task: asyncio.Task[None]) -> None:
        """Hands a defect in the tending of a replica, once the task has ended, to all who wait for one."""
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            self._fault = fault
            self._tell()

    async def started(self) -> None:
        """Waits until each replica is READY. Raises GeneratorDead when one could not be started."""
        while not all(replica.state is State.READY for replica in self._replicas):
            changed = self._changed
            if self._fault is not None:
                raise self._fault
            for replica in self._replicas:
                if replica.state is State.GONE:
                    raise GeneratorDead(replica.last_death)
            await changed.wait()

    def keepers(self) -> list[Coroutine[None, None, None]]:
        """What must run as long as the replicas are used, one for each."""
        return [self._keep(replica) for replica in self._replicas]

    def _tell(self) -> None:
        """Wakes all who wait for a change of states."""
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def open_replicas(
    opens: Sequence[Open],
    patience: Patience = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
    announce: Announce | None = None,
) -> AsyncIterator[Replicas]:
    """Starts one generator for each of `opens` and keeps them going for the length of the block.

    Raises GeneratorDead when one of them does not start.
    """
    replicas = Replicas(opens, patience, clock, announce)
    keepers = [asyncio.create_task(keeper, name="replica") for keeper in replicas.keepers()]
    for keeper in keepers:
        keeper.add_done_callback(replicas.hear)
    try:
        await replicas.started()
        yield replicas
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)
