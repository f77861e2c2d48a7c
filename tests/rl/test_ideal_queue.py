"""The loop loses no time: its steps end when those of a queue end that is simulated from the rules alone."""

from __future__ import annotations

from collections import defaultdict

import pytest

from rl.bench.arms import (
    ARMS,
    FULL_BATCH_SECONDS,
    GROUPS,
    MEAN_TOKENS,
    POOL,
    SAMPLES,
    UPDATE_SECONDS,
    Arm,
    Cell,
    World,
)
from rl.bench.plant import plant
from rl.bench.virtual import run_virtual
from tests.rl.ideal_queue import IdealQueue, Played, Rates

STEPS = 12
CAPACITY = GROUPS * SAMPLES * MEAN_TOKENS / FULL_BATCH_SECONDS
Drawn = list[tuple[int, int, bool]]


async def played(cell: Cell) -> tuple[list[float], Drawn]:
    """How long each step of the loop took, and the episodes that were drawn in it."""
    async with plant(cell) as built:
        await built.loop.run()
        return [row["time/step"] for row in built.rows], built.episodes.drawn


def groups(drawn: Drawn) -> list[Played]:
    """In the order of their first attempts; of the last ones not all attempts may have begun."""
    found: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    for number, tokens, solved in drawn:
        found[number].append((tokens, solved))
    return [
        Played([tokens for tokens, _ in attempts], len({solved for _, solved in attempts}) == 1)
        for attempts in found.values()
    ]


@pytest.mark.parametrize("world", [World(1.0), World(2.0, "lognormal 0.5")], ids=["matched", "fast"])
@pytest.mark.parametrize(
    "arm", [arm for arm in ARMS if arm.name in ("sync", "async-1", "async-2")], ids=lambda arm: arm.name
)
def test_steps_take_as_long_as_the_rules_say_and_no_longer(arm: Arm, world: World) -> None:
    cell = Cell(arm, world, steps=STEPS)
    seconds, drawn = run_virtual(played(cell))
    rates = Rates(
        streams=cell.streams,
        tokens_per_second=CAPACITY / cell.streams,
        tool=POOL.command_seconds,
        trained=world.train_seconds / (GROUPS * SAMPLES * MEAN_TOKENS),
        update=UPDATE_SECONDS,
    )
    ideal = IdealQueue(groups(drawn), arm.bound, GROUPS, rates).step_seconds(STEPS)
    # Tools go on while weights are updated, which moves an end by no more than an update takes.
    assert seconds == pytest.approx(ideal, abs=UPDATE_SECONDS)
    assert sum(seconds) == pytest.approx(sum(ideal), rel=0.002)
