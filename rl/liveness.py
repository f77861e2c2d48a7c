"""Finds out a generator that takes requests and draws nothing, as an engine does that waits for itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from rl.generator import GeneratorDead, GeneratorUnavailable, Sampling
from rl.replica import Life, Replica

PROBE_IDS = np.zeros(1, np.int32)
"""Any vocabulary has a token 0."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """`still_seconds`: how long nothing may move while requests run, until the generator is probed; at most
    twice that passes. `probe_seconds`: how long it may take to draw the one token that it is asked for then.

    A pass of the slowest engine is shorter, also on a busy machine; one that compiles first may not be.
    """

    still_seconds: float = 30.0
    probe_seconds: float = 30.0


LIVENESS = Liveness()


@runtime_checkable
class Pulsing(Protocol):
    """A generator that can say whether it computes, other than by ending requests."""

    async def pulse(self) -> int:
        """A number that changes while it computes; -1 when it does not answer."""
        ...


async def until_hung(replica: Replica, life: Life, rule: Liveness) -> str:
    """Ends, with the reason, once the generator of this life hangs.

    That is: it has had a request for `still_seconds` in which none ended, its pulse stood still and no update
    of its weights was under way; and then it does not draw one token either.
    """
    before = None
    while True:
        await asyncio.sleep(rule.still_seconds)
        if not replica.running or replica.updating:
            before = None
            continue
        now = (replica.ended, life.generator.version, await _pulse(life, rule))
        if now == before and replica.running and not replica.updating:
            try:
                await proof(life, rule)
            except GeneratorDead as hung:
                return str(hung)
        before = now


async def proof(life: Life, rule: Liveness) -> None:
    """Has one token drawn. Raises GeneratorDead when that takes too long or fails."""
    try:
        async with asyncio.timeout(rule.probe_seconds):
            await life.run(life.generator.generate(PROBE_IDS, Sampling(1)))
    except (TimeoutError, GeneratorUnavailable) as error:
        raise GeneratorDead(
            f"it hangs: nothing moved for {rule.still_seconds:g} s, and one token was not drawn within "
            f"{rule.probe_seconds:g} s"
        ) from error


async def _pulse(life: Life, rule: Liveness) -> int:
    generator = life.generator
    if not isinstance(generator, Pulsing):
        return generator.stats().finished
    try:
        async with asyncio.timeout(rule.probe_seconds):
            return await generator.pulse()
    except TimeoutError:
        return -1
