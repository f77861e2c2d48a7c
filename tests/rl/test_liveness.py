"""Engines that take requests and never answer are found out and replaced; slow ones are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.bench.virtual import elapse, run_virtual
from rl.generator import Generation, GeneratorDead, Sampling
from rl.generators.calls import ServerSettings
from rl.generators.fake import ByteTokenizer, FakeGenerator, sums_reply
from rl.generators.fake_server import HANG, FakeServer, serving
from rl.generators.server import open_server
from rl.liveness import Liveness
from rl.replica import State
from rl.replicas import Patience, open_replicas
from rl.types import TokenIds

PROMPT = np.array(ByteTokenizer().encode("What is 1 + 2?"), np.int32)
SAMPLING = Sampling(64)
PATIENCE = Patience(pause_seconds=0.0, liveness=Liveness(still_seconds=30.0, probe_seconds=20.0))
WEIGHTS = Path("/weights")


class Slow(FakeGenerator):
    """Draws for `seconds`, and says that it computes meanwhile if it `pulses`; a single token comes at once
    unless it `hangs`, when nothing ever comes."""

    def __init__(self, seconds: float = 0.0, *, pulses: bool = False, hangs: bool = False) -> None:
        super().__init__(ByteTokenizer(), sums_reply(lambda version: 1.0))
        self.probed = 0
        self._seconds = seconds
        self._pulses = pulses
        self._hangs = hangs
        self._count = 0

    async def pulse(self) -> int:
        self._count += self._pulses
        return self._count

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        if sampling.max_tokens == 1:
            self.probed += 1
        if self._hangs:
            await asyncio.Event().wait()
        await elapse(self._seconds if sampling.max_tokens > 1 else 0.0)
        return await super().generate(context_ids, sampling)


class Stage:
    """Starts generators and keeps them: `make(place, number)` is the `number`th of its place."""

    def __init__(self, make: Callable[[int, int], Slow]) -> None:
        self.made: dict[int, list[Slow]] = {}
        self._make = make

    def opens(self, count: int) -> list[Callable[[], Any]]:
        return [self._open(place) for place in range(count)]

    def _open(self, place: int) -> Callable[[], Any]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Slow]:
            made = self.made.setdefault(place, [])
            made.append(self._make(place, len(made)))
            yield made[-1]

        return opened


def test_requests_of_a_hung_engine_go_on_elsewhere_and_it_is_started_again() -> None:
    stage = Stage(lambda place, number: Slow(1.0, hangs=(place, number) == (0, 0)))

    async def body() -> None:
        loop = asyncio.get_running_loop()
        async with open_replicas(stage.opens(2), PATIENCE) as replicas:
            await replicas.update_weights(WEIGHTS, 1)
            began = loop.time()
            drawn = await asyncio.gather(*(replicas.generate(PROMPT, SAMPLING) for _ in range(6)))
            assert all(generation.spans[0].version == 1 for generation in drawn)
            # Two looks at it, 30 s apart, and a probe of 20 s.
            assert loop.time() - began < 2 * 30 + 20 + 5
            assert replicas.stats().finished == 6 + stage.made[0][1].probed
            while replicas.states != [State.READY, State.READY]:
                await elapse(0.1)
            # What takes its place must draw before it gets a request.
            assert (stage.made[0][1].probed, stage.made[0][1].version) == (1, 1)

    run_virtual(body())


@pytest.mark.parametrize("pulses", [True, False])
def test_a_slow_engine_is_left_alone(*, pulses: bool) -> None:
    """It is not even probed while it says that it computes."""
    stage = Stage(lambda place, number: Slow(500.0, pulses=pulses))

    async def body() -> None:
        async with open_replicas(stage.opens(1), PATIENCE) as replicas:
            await replicas.generate(PROMPT, SAMPLING)
            assert replicas.restarts == 0
            assert bool(stage.made[0][0].probed) is not pulses

    run_virtual(body())


def test_an_engine_without_requests_is_not_probed() -> None:
    stage = Stage(lambda place, number: Slow(hangs=True))

    async def body() -> None:
        async with open_replicas(stage.opens(1), PATIENCE) as replicas:
            await elapse(1000.0)
            assert stage.made[0][0].probed == 0
            assert replicas.restarts == 0

    run_virtual(body())


def test_a_defect_in_the_watch_over_an_engine_is_heard_at_once() -> None:
    """Unheard, nobody would watch this engine any more, and were it to hang it would hold its requests."""

    class Odd(Slow):
        async def pulse(self) -> int:
            raise ZeroDivisionError("a defect")

    stage = Stage(lambda place, number: Odd(hangs=True))

    async def body() -> None:
        async with open_replicas(stage.opens(1), PATIENCE) as replicas:
            hung = asyncio.ensure_future(replicas.generate(PROMPT, SAMPLING))
            await elapse(31.0)
            with pytest.raises(ZeroDivisionError, match="a defect"):
                await replicas.generate(PROMPT, SAMPLING)
            hung.cancel()
            await asyncio.wait((hung,))

    run_virtual(body())


def test_engines_that_all_hang_end_the_run() -> None:
    stage = Stage(lambda place, number: Slow(hangs=True))

    async def body() -> None:
        async with open_replicas(stage.opens(2), PATIENCE) as replicas:
            with pytest.raises(
                GeneratorDead, match="all generators are gone; the last one: it hangs: nothing"
            ):
                await replicas.generate(PROMPT, SAMPLING)
            assert [len(made) for made in stage.made.values()] in ([3, 1], [1, 3], [3, 3])

    run_virtual(body())


def test_a_server_that_never_answers_is_found_out_by_its_own_counters(tmp_path: Path) -> None:
    """In real time, by HTTP: the server takes requests, says that it is well, and counts no passes."""
    servers = [FakeServer(FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 1.0))) for _ in range(2)]
    servers[0].faults["/inference/v1/generate"].append("none")  # the question whether it draws at all
    servers[0].faults["/inference/v1/generate"] += [HANG] * 99
    patience = Patience(pause_seconds=0.0, liveness=Liveness(still_seconds=0.5, probe_seconds=2.0))

    async def body() -> None:
        async with asyncio.timeout(20), serving(servers[0]) as first, serving(servers[1]) as second:
            opens = [
                lambda url=url: open_server(ServerSettings(url, tmp_path, max_context=200))
                for url in (first, second)
            ]
            async with open_replicas(opens, patience) as replicas:
                drawn = await asyncio.gather(*(replicas.generate(PROMPT, SAMPLING) for _ in range(4)))
                assert len(drawn) == 4
                assert servers[1].generator.stats().finished >= 4
                assert servers[0].generator.stats().finished == 0

    asyncio.run(body())
