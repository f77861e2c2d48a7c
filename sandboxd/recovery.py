"""What a new daemon does about the one before it that was killed: takes over what is noted, ends the rest.

The journal says what should be there, the backends what is. A sandbox that both know is taken over, with its
lease and its timer; one that only the journal knows has died; one that only a backend knows was on its way
up or down, and is destroyed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

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


async def reclaim(backend: Backend, sandboxes: Iterable[str], clock: Clock) -> None:
    """Destroys what nobody holds, until nothing of it is left."""
    left = set(sandboxes)
    while left:
        for sandbox_id in sorted(left):
            try:
                with faults_become(BackendUnavailable, f"destroying {sandbox_id}", known=BackendUnavailable):
                    await backend.destroy(sandbox_id)
            except BackendUnavailable as error:
                logger.warning("%s; trying again in %g s", error.message, RECLAIM_PAUSE_SECONDS)
            else:
                left.discard(sandbox_id)
        if left:
            await clock.sleep(RECLAIM_PAUSE_SECONDS)
