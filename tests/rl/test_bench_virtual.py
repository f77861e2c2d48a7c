"""Virtual time, and the engine that is simulated in it: exact durations, shared rates, versions, stalls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rl.bench.engine import SimulatedEngine, Speed
from rl.bench.episodes import Episodes, MarkedBytes, Simulated
from rl.bench.virtual import Stalled, elapse, run_virtual
from rl.dialogue import Dialogue
from rl.generator import Generation, Sampling
from rl.tasks import TaskSource
from rl.types import TokenIds

SAMPLING = Sampling(1 << 20)
NOWHERE = Path("nowhere")


def test_hours_pass_in_no_time_and_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def nap(name: str, seconds: float) -> None:
        await elapse(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(nap("long", 7200.0))
            tasks.create_task(nap("short", 0.5))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(60.0):
                    await asyncio.Event().wait()
            seen.append(("timeout", asyncio.get_running_loop().time()))

    run_virtual(body())
    assert seen == [("short", 0.5), ("timeout", 60.0), ("long", 7200.0)]


def test_what_would_wait_for_ever_is_told_so() -> None:
    with pytest.raises(Stalled, match=r"nothing would ever happen after 3\.0 virtual seconds"):
        run_virtual(_stall())


async def _stall() -> None:
    await elapse(3.0)
    await asyncio.Event().wait()


def test_time_that_would_really_pass_is_refused() -> None:
    with pytest.raises(RuntimeError, match="5 s would really pass here"):
        asyncio.run(elapse(5.0))


def test_work_for_threads_is_done_at_once_and_its_errors_come_out() -> None:
    async def body() -> str:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(str.upper, "done")

    assert run_virtual(body()) == "DONE"


def contexts(count: int) -> list[TokenIds]:
    source, dialogue = TaskSource([Simulated(0.0)]), Dialogue(MarkedBytes(), Simulated.rules.style)
    return [dialogue.prompt(source.train("simulated", 0, n).question) for n in range(count)]


def engine(speed: Speed, tokens: int = 200) -> SimulatedEngine:
    return SimulatedEngine(speed, Episodes(tokens, 0.0, seed=0))


async def timed(made: SimulatedEngine, context: TokenIds) -> tuple[float, Generation]:
    generation = await made.generate(context, SAMPLING)
    return asyncio.get_running_loop().time(), generation


@pytest.mark.parametrize(("count", "seconds"), [(1, 10.0), (4, 10.0), (8, 20.0)])
def test_requests_share_the_engine_up_to_their_own_rate(count: int, seconds: float) -> None:
    """First turns of 100 tokens at 10 a second alone, 40 a second together."""

    async def body() -> list[float]:
        made = engine(Speed(capacity=40.0, stream_rate=10.0))
        done = await asyncio.gather(*(timed(made, context) for context in contexts(count)))
        assert made.served_tokens == pytest.approx(100.0 * count)
        return [when for when, _ in done]

    assert run_virtual(body()) == pytest.approx([seconds] * count)


def test_a_request_that_is_cancelled_leaves_its_share_to_the_others() -> None:
    async def body() -> float:
        made = engine(Speed(capacity=10.0, stream_rate=10.0))
        first, second = contexts(2)
        async with asyncio.TaskGroup() as tasks:
            kept = tasks.create_task(timed(made, first))
            given_up = tasks.create_task(timed(made, second))
            await elapse(10.0)
            given_up.cancel()
        assert made.stats().running == 0
        return kept.result()[0]

    assert run_virtual(body()) == pytest.approx(10.0 + 5.0), "50 tokens in 10 s, the other 50 in 5 s"


def test_an_update_pauses_and_splits_the_versions_where_it_came() -> None:
    async def body() -> None:
        made = engine(Speed(capacity=10.0, stream_rate=10.0, update_seconds=2.0))
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(timed(made, contexts(1)[0]))
            await elapse(3.0)
            await made.update_weights(NOWHERE, 1)
        when, generation = job.result()
        assert when == pytest.approx(12.0)
        assert [(span.version, span.start, span.end) for span in generation.spans] == [
            (0, 0, 30),
            (1, 30, 100),
        ]
        stats = made.stats()
        assert (stats.busy_seconds, stats.paused_seconds) == pytest.approx((10.0, 2.0))

    run_virtual(body())


def test_episodes_are_drawn_from_their_seed_with_the_mean_that_was_asked_for() -> None:
    def lengths(spread: float, seed: int) -> list[int]:
        source, dialogue = TaskSource([Simulated(spread)]), Dialogue(MarkedBytes(), Simulated.rules.style)
        episodes, found = Episodes(1000, spread, seed), []
        for number in range(1500):
            before = episodes.tokens
            episodes.turn(dialogue.prompt(source.train("simulated", 0, number).question), 1 << 20)
            found.append(episodes.tokens - before)
        return found

    assert set(lengths(0.0, 0)) == {1000}
    spread = np.array(lengths(1.0, 0))
    assert spread.mean() == pytest.approx(1000, rel=0.15)
    assert np.log(spread).std() == pytest.approx(1.0, rel=0.1)
    assert lengths(1.0, 0) == spread.tolist()
    assert lengths(1.0, 1) != spread.tolist()
