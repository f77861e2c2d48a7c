"""An episode that is cut off at any wait leaves no lease and no token out of the books."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rl.errors import LedgerError
from rl.ledger import Ledger, MeteredGenerator
from rl.observer import sandbox_totals
from rl.player import Player
from rl.rollout import Rollout
from rl.sandboxes import DaemonSandboxes, leases_ended
from rl.summary import check_sandboxes
from sandboxd import Client
from sandboxd.config import load
from sandboxd.daemon import running
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.wire import duration
from tests.cut_kit import Moment, sweep
from tests.rl.test_rollout import DIALOGUE, LIMITS, TASK, Recorder, verify

POOLS = {"python": {"backend": "fake", "warm": 4}}


@pytest.mark.parametrize("moment", Moment)
def test_an_episode_that_is_cut_off_at_any_wait_leaves_no_lease(tmp_path: Path, moment: Moment) -> None:
    """As at the end of a run: the client of the rollouts is closed, and the counts are read at once."""

    async def body() -> int:
        config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=POOLS)
        async with (
            asyncio.timeout(40),
            running(config) as addresses,
            Client(addresses[0]) as control,
            AsyncExitStack() as stack,
        ):
            before, ledger = await control.get_pool("python"), Ledger()
            client = await stack.enter_async_context(Client(addresses[0]))

            async def episode() -> None:
                sandboxes = DaemonSandboxes(client, "python", ttl=3600, timeout=30)
                generator = MeteredGenerator(Recorder("print(42)\n```\n", "42"), ledger)
                rollout = Rollout(generator, sandboxes, DIALOGUE, verify, limits=LIMITS)
                await Player(rollout, ledger, concurrent=1, episode_seconds=30.0).play(TASK)

            async def books_close(wait: int) -> None:
                await stack.aclose()
                after = await control.get_pool("python")
                check_sandboxes(before, after)
                assert sandbox_totals(before, after)["expired"] == 0, wait
                ledger.settle_open()
                ledger.check()
                await stack.enter_async_context(client)

            return await sweep(episode, moment, books_close)

    assert asyncio.run(body()) >= 4


def test_a_lease_that_nobody_gave_back_is_waited_for_and_counted(tmp_path: Path) -> None:
    """One that a run found there, and one of its own whose release was never heard."""

    async def body() -> None:
        config = load(None, state_dir=tmp_path / "state", drain_seconds=0.2, pools=POOLS)
        async with running(config) as addresses, Client(addresses[0]) as control:
            async with Client(addresses[0]) as former:
                left = [await former.acquire("python", ttl=3600, timeout=20)]
            before = await control.get_pool("python")
            async with Client(addresses[0]) as client:
                left.append(await client.acquire("python", ttl=3600, timeout=20))
            after = await leases_ended(control, "python", within=0.0)
            with pytest.raises(LedgerError, match="unaccounted"):
                check_sandboxes(before, after)
            for box in left:
                # What is left of an hour is over in a moment.
                soon = pb.RenewSandboxRequest(name=box.name, ttl=duration(0.1))
                await control.sandboxes.RenewSandbox(soon)
            after = await leases_ended(control, "python", within=20.0)
            check_sandboxes(before, after)
            ended = {"inherited": 1, "acquired": 1, "released": 0, "expired": 2, "lost": 0, "active": 0}
            assert sandbox_totals(before, after) == ended

    asyncio.run(body())
