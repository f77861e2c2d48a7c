"""A real loop on real sandboxes, some of which are killed in the middle of a command."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rl.generators.fake import sums_reply
from rl.observer import sandbox_totals
from rl.plan import Plan
from rl.sandboxes import DaemonSandboxes
from rl.summary import check_sandboxes
from sandboxd import Client
from sandboxd.child import child_daemon
from tests.rl.harness import Counting, Rig

VICTIMS = (0, 2, 5)
"""Which first turns hang: two of the first group of four, one of the second."""


def guests_running(mark: str) -> Iterator[int]:
    """Numbers of the guests (PID 1 of a sandbox) of which a child has `mark` in its command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                yield int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue


def test_an_episode_whose_sandbox_is_killed_is_unscored_and_never_a_zero(tmp_path: Path) -> None:
    """The first commands hang; their guests are killed; advantages are those of the episodes left."""
    mark = f"mark-{uuid.uuid4().hex}"
    turns = itertools.count()
    adds = sums_reply(lambda version: 0.5)

    def reply(dialogue: str, version: int, rng: random.Random) -> str:
        if "Output:" not in dialogue.rpartition("<|im_start|>user")[2] and next(turns) in VICTIMS:
            return f"import time; time.sleep(600)  # {mark}\n```"
        return adds(dialogue, version, rng)

    async def kill_victims() -> None:
        killed: set[int] = set()
        while len(killed) < len(VICTIMS):
            for guest in await asyncio.to_thread(lambda: set(guests_running(mark)) - killed):
                os.kill(guest, signal.SIGKILL)
                killed.add(guest)

    async def body() -> Rig:
        # A short path: the daemon's socket lies in it.
        async with child_daemon(tmp_path / "d") as address, Client(address) as control:
            before = await control.get_pool("python")
            async with Client(address) as client:
                plan = Plan(steps=3, groups_per_batch=2, samples_per_group=4)
                sandboxes = DaemonSandboxes(client, "python", ttl=60.0, timeout=60.0)
                rig = Rig(tmp_path, plan=plan, reply=reply, sandboxes=sandboxes, code_seconds=60.0, bound=0)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(kill_victims())
                    await rig.loop.run()
            after = await control.get_pool("python")
        check_sandboxes(before, after)
        totals = sandbox_totals(before, after)
        assert totals["acquired"] > totals["lost"] == len(VICTIMS)
        return rig

    rig = asyncio.run(body())
    rig.ledger.check()
    assert rig.loop.step == 3
    assert rig.ledger.episodes.reasons["unscored:SANDBOX_LOST"] == len(VICTIMS)
    heard = dict(rig.curriculum.heard) if isinstance(rig.curriculum, Counting) else {}
    assert sum(4 - len(rewards) for rewards in heard.values()) == len(VICTIMS)
    assert sorted(len(rewards) for rewards in heard.values())[:2] == [2, 3]
    for group in (group for batch in rig.trainer.batches for group in batch.groups):
        rewards = np.array(heard[group.task_key])
        expected = (rewards - rewards.mean()) / rewards.std()
        assert [sample.advantage for sample in group.samples] == pytest.approx(expected)
