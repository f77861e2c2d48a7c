"""What a new daemon does about the one before it that was killed: takes over what is noted, ends the rest.

The journal says what should be there, the backends what is. A sandbox that both know is taken over, with its
lease and its timer; one that only the journal knows has died; one that only a backend knows was on its way
up or down, and is destroyed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from asyncio_pool import AioPool

from sandboxd.backends.base import Backend, Connection
from sandboxd.clock import Clock
from sandboxd.errors import BackendUnavailable, SandboxdError
from sandboxd.journal import Entry, Journal
from sandboxd.lifetime import faults_become
from sandboxd.pool import Pool
from sandboxd.sandbox import template_of

logger = logging.getLogger(__name__)

# A thousand sandboxes are not asked all at once, and one that does not answer in this time is given up.
ASKED_AT_ONCE = 64
ANSWER_SECONDS = 10.0
# What could not be destroyed is tried again after this pause.
RECLAIM_PAUSE_SECONDS = 1.0


async def recover(pool: Pool, backend: Backend, journal: Journal, there: set[str]) -> set[str]:
    """Hands the pool what an earlier daemon left of it, before it runs; returns what it took over.

    `there` are the sandboxes that the backend knows. A warm one that was made from another template is not
    taken over. Never raises for one sandbox: it then counts as died.
    """
    past = journal.past()
    digest = pool.template.digest
    wanted = [
        entry
        for entry in past.entries
        if entry.id in there and (entry.expiry is not None or entry.made_from == digest)
    ]
    connections: dict[str, Connection] = {}

    async def connect(entry: Entry) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connections[entry.id] = await backend.adopt(entry.id, template_of(entry, pool.template))
        except TimeoutError:
            logger.warning("sandbox %s does not answer within %g s: given up", entry.id, ANSWER_SECONDS)
        except SandboxdError as error:
            logger.warning("sandbox %s cannot be taken over: %s", entry.id, error.message)

    async with AioPool(size=ASKED_AT_ONCE) as asking:
        for entry in wanted:
            await asking.spawn(connect(entry))
    pool.restore(past, connections)
    if past.entries:
        leased = sum(entry.expiry is not None and entry.id in connections for entry in past.entries)
        logger.info(
            "pool %s: took over %d sandboxes, %d of them leased; %d are gone",
            pool.name,
            len(connections),
            leased,
            len(past.entries) - len(connections),
        )
    return set(connections)


def branches_in_use(pools: Iterable[Pool]) -> set[str]:
    """The copies that a sandbox of one of the pools began with."""
    own = [sandbox.template for pool in pools for sandbox in pool.sandboxes()]
    return {branch for template in own if template is not None for branch in template.branches}


async def reclaim(
    backend: Backend, sandboxes: Iterable[str], clock: Clock, branches: Iterable[str] = ()
) -> None:
    """Destroys what nobody holds, and then the copies that nobody uses, until nothing of it is left."""
    await _remove_all(sandboxes, backend.destroy, clock)
    await _remove_all(branches, backend.prune, clock)


async def _remove_all(names: Iterable[str], remove: Callable[[str], Awaitable[None]], clock: Clock) -> None:
    left = set(names)
    while left:
        for name in sorted(left):
            try:
                with faults_become(BackendUnavailable, f"removing {name}", known=BackendUnavailable):
                    await remove(name)
            except BackendUnavailable as error:
                logger.warning("%s; trying again in %g s", error.message, RECLAIM_PAUSE_SECONDS)
            else:
                left.discard(name)
        if left:
            await clock.sleep(RECLAIM_PAUSE_SECONDS)
