"""Several generators as one: current weights before any request, and deaths that cost no episode."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.generator import Generation, GeneratorDead, GeneratorUnavailable, Sampling, UpdateFailed
from rl.generators.calls import ServerSettings
from rl.generators.fake import ByteTokenizer, FakeGenerator, sums_reply
from rl.generators.server import ServerGenerator, open_server
from rl.plan import Plan
from rl.replica import State
from rl.replicas import Patience, Replicas, open_replicas
from rl.types import Batch, TokenIds
from rl.weights import open_segment_file
from tests.rl.harness import Rig

PROMPT = np.array(ByteTokenizer().encode("What is 1 + 2?"), np.int32)
SAMPLING = Sampling(64)
PATIENCE = Patience(pause_seconds=0.0)
WEIGHTS = Path("/weights")


class Stage:
    """Opens fake generators and keeps them: `made[place]` are those of one place, in order. `options(place,
    number)` are those of its `number`th start; it may raise GeneratorDead."""

    def __init__(self, options: Callable[[int, int], dict[str, Any]] = lambda place, number: {}) -> None:
        self.made: dict[int, list[FakeGenerator]] = {}
        self.closed = 0
        self._options = options

    def opens(self, count: int) -> list[Callable[[], Any]]:
        return [self._open(place) for place in range(count)]

    def _open(self, place: int) -> Callable[[], Any]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[FakeGenerator]:
            made = self.made.setdefault(place, [])
            options = self._options(place, len(made))
            kind = options.pop("kind", FakeGenerator)
            made.append(kind(ByteTokenizer(), sums_reply(lambda version: 1.0), **options))
            try:
                yield made[-1]
            finally:
                self.closed += 1

        return opened


def play(
    stage: Stage,
    body: Callable[[Replicas], Coroutine[Any, Any, None]],
    count: int = 2,
    patience: Patience = PATIENCE,
) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20), open_replicas(stage.opens(count), patience) as replicas:
            await body(replicas)

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    """Lets the others run until something is so; the test's time limit bounds it."""
    while not condition():
        await asyncio.sleep(0)


def versions(generation: Generation) -> set[int]:
    return {span.version for span in generation.spans}


def test_requests_go_to_whoever_has_fewest() -> None:
    gate = asyncio.Event()
    stage = Stage(lambda place, number: {"gate": lambda: gate})

    async def body(replicas: Replicas) -> None:
        drawing = [asyncio.ensure_future(replicas.generate(PROMPT, SAMPLING)) for _ in range(6)]
        await until(lambda: sum(made[0].stats().running for made in stage.made.values()) == 6)
        assert [made[0].stats().running for made in stage.made.values()] == [2, 2, 2]
        gate.set()
        await asyncio.gather(*drawing)
        stats = replicas.stats()
        assert (stats.finished, stats.running) == (6, 0)
        assert stats.prompt_tokens == 6 * len(PROMPT)

    play(stage, body, count=3)
    assert stage.closed == 3


def test_requests_of_a_dead_generator_are_drawn_on_another_and_it_comes_back_with_the_weights() -> None:
    gate = asyncio.Event()
    stage = Stage(lambda place, number: {"gate": lambda: gate})

    async def body(replicas: Replicas) -> None:
        await replicas.update_weights(WEIGHTS, 1)
        drawing = [asyncio.ensure_future(replicas.generate(PROMPT, SAMPLING)) for _ in range(4)]
        await until(lambda: replicas.stats().running == 4)
        stage.made[0][0].die()
        await until(lambda: len(stage.made[0]) == 2 and replicas.states == [State.READY] * 2)
        assert stage.made[0][1].version == 1
        gate.set()
        drawn = await asyncio.gather(*drawing)
        assert [versions(generation) for generation in drawn] == [{1}] * 4
        assert replicas.restarts == 1
        # What the dead one drew was heard of by nobody, and counts for nothing.
        assert replicas.stats().finished == 4
        assert replicas.stats().generated_tokens == sum(len(generation.ids) for generation in drawn)

    play(stage, body)


def test_requests_of_the_only_generator_wait_for_its_return() -> None:
    gate = asyncio.Event()
    stage = Stage(lambda place, number: {} if number else {"gate": lambda: gate})

    async def body(replicas: Replicas) -> None:
        await replicas.update_weights(WEIGHTS, 1)
        drawing = asyncio.ensure_future(replicas.generate(PROMPT, SAMPLING))
        await until(lambda: replicas.stats().running == 1)
        stage.made[0][0].die()
        assert versions(await drawing) == {1}

    play(stage, body, count=1)


def test_a_generator_that_an_update_passed_by_draws_nothing_until_it_has_caught_up() -> None:
    stage = Stage(lambda place, number: {"failing_updates": [1]} if (place, number) == (0, 0) else {})

    async def body(replicas: Replicas) -> None:
        await replicas.update_weights(WEIGHTS, 1)
        assert replicas.version == 1
        assert replicas.states == [State.BEHIND, State.READY]
        for _ in range(4):
            assert versions(await replicas.generate(PROMPT, SAMPLING)) == {1}
        assert stage.made[0][0].stats().finished == 0
        # It does not take them however often it is asked, so it is started again.
        await until(lambda: replicas.states == [State.READY, State.READY])
        assert [generator.version for generator in stage.made[0]] == [0, 1]

    play(stage, body)


def test_weights_that_no_generator_takes_change_nothing() -> None:
    stage = Stage(lambda place, number: {"failing_updates": [2]})

    async def body(replicas: Replicas) -> None:
        await replicas.update_weights(WEIGHTS, 1)
        with pytest.raises(UpdateFailed, match="no generator took weights 2: weights 2 from /weights"):
            await replicas.update_weights(WEIGHTS, 2)
        assert replicas.version == 1
        assert replicas.states == [State.READY, State.READY]
        assert versions(await replicas.generate(PROMPT, SAMPLING)) == {1}
        with pytest.raises(UpdateFailed, match="weights 1 are not newer than weights 1"):
            await replicas.update_weights(WEIGHTS, 1)
        await replicas.update_weights(WEIGHTS, 3)
        assert replicas.stats().updates == 2

    play(stage, body)


class Hanging(FakeGenerator):
    """Its updates never end."""

    async def update_weights(self, path: Path, version: int) -> None:
        await asyncio.Event().wait()


def test_an_update_that_hangs_is_given_up_and_its_generator_started_again() -> None:
    stage = Stage(lambda place, number: {"kind": Hanging} if (place, number) == (0, 0) else {})

    async def body(replicas: Replicas) -> None:
        await replicas.update_weights(WEIGHTS, 1)
        assert replicas.version == 1
        assert replicas.states[1] is State.READY
        await until(lambda: len(stage.made[0]) == 2 and replicas.states == [State.READY] * 2)
        assert stage.made[0][1].version == 1

    play(stage, body, patience=Patience(pause_seconds=0.0, update_seconds=0.5))


def test_a_generator_that_comes_up_during_an_update_gets_the_newest() -> None:
    updating, going_on = asyncio.Event(), asyncio.Event()

    class Slow(FakeGenerator):
        async def update_weights(self, path: Path, version: int) -> None:
            updating.set()
            await going_on.wait()
            await super().update_weights(path, version)

    stage = Stage(lambda place, number: {"kind": Slow} if place else {})

    async def body(replicas: Replicas) -> None:
        stage.made[0][0].die()
        drawn = await replicas.generate(PROMPT, SAMPLING)  # by this the death is noticed, and it starts again
        assert versions(drawn) == {0}
        update = asyncio.ensure_future(replicas.update_weights(WEIGHTS, 1))
        await updating.wait()
        await until(lambda: len(stage.made[0]) == 2)
        going_on.set()
        await update
        await until(lambda: replicas.states == [State.READY, State.READY])
        assert stage.made[0][-1].version == 1

    play(stage, body)


def test_one_that_never_starts_is_given_up_at_once_with_its_reason() -> None:
    def options(place: int, number: int) -> dict[str, Any]:
        raise GeneratorDead(f"no memory for generator {place}")

    with pytest.raises(GeneratorDead, match="no memory for generator 0"):
        play(Stage(options), lambda replicas: asyncio.sleep(0), count=1)


def test_when_all_are_gone_every_request_ends() -> None:
    broken = False

    def options(place: int, number: int) -> dict[str, Any]:
        if broken:
            raise GeneratorDead(f"place {place} is out of order")
        return {"gate": asyncio.Event}

    stage = Stage(options)

    async def body(replicas: Replicas) -> None:
        nonlocal broken
        drawing = [asyncio.ensure_future(replicas.generate(PROMPT, SAMPLING)) for _ in range(3)]
        await until(lambda: replicas.stats().running == 3)
        broken = True
        for made in list(stage.made.values()):
            made[0].die()
        for request in drawing:
            with pytest.raises(GeneratorDead, match=r"all generators are gone; .* is out of order"):
                await request
        assert replicas.states == [State.GONE, State.GONE]
        with pytest.raises(GeneratorDead):
            await replicas.update_weights(WEIGHTS, 1)

    play(stage, body)


class Mortal(FakeGenerator):
    """Dies of a certain prompt."""

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        if len(context_ids) == 1:
            self.die()
        return await super().generate(context_ids, sampling)


def test_a_request_that_kills_every_generator_is_given_up_alone() -> None:
    stage = Stage(lambda place, number: {"kind": Mortal})

    async def body(replicas: Replicas) -> None:
        await replicas.generate(PROMPT, SAMPLING)
        with pytest.raises(GeneratorUnavailable, match="given up after 3 generators died of it"):
            await replicas.generate(PROMPT[:1], SAMPLING)
        assert versions(await replicas.generate(PROMPT, SAMPLING)) == {0}

    play(stage, body, patience=Patience(starts=9, pause_seconds=0.0))


def reluctant(begun: asyncio.Event, cut: asyncio.Event, gate: asyncio.Event) -> type[FakeGenerator]:
    """A generator whose requests never end, and once cancelled only when the gate opens."""

    class Reluctant(FakeGenerator):
        async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
            begun.set()
            try:
                return await asyncio.Future()
            finally:
                cut.set()
                await gate.wait()

    return Reluctant


def test_a_generator_is_closed_also_after_a_request_that_was_cancelled_twice() -> None:
    """Once to end it, and once more while what it waits for had not ended yet."""
    begun, cut, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    stage = Stage(lambda place, number: {"kind": reluctant(begun, cut, gate)})

    async def body(replicas: Replicas) -> None:
        drawing = asyncio.ensure_future(replicas.generate(PROMPT, SAMPLING))
        await begun.wait()
        drawing.cancel()
        await cut.wait()
        drawing.cancel()
        await asyncio.wait((drawing,))
        assert (drawing.cancelled(), stage.closed) == (True, 0)
        gate.set()

    play(stage, body, count=1)
    assert stage.closed == 1


def test_no_generator_is_closed_under_a_call_however_often_its_keeper_is_cancelled() -> None:
    """As at the end of a program, which cancels whatever still runs."""
    begun, cut, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    stage = Stage(lambda place, number: {"kind": reluctant(begun, cut, gate)})

    async def body(replicas: Replicas) -> None:
        (keeper,) = (task for task in asyncio.all_tasks() if task.get_name() == "replica")
        drawing = asyncio.ensure_future(replicas.generate(PROMPT, SAMPLING))
        await begun.wait()
        for _ in range(5):
            keeper.cancel()
            await asyncio.sleep(0)
        await cut.wait()
        keeper.cancel()
        await asyncio.sleep(0)
        assert (keeper.done(), stage.closed) == (False, 0)
        gate.set()
        await asyncio.wait((keeper,))
        assert (keeper.cancelled(), stage.closed) == (True, 1)
        drawing.cancel()
        await asyncio.wait((drawing,))

    play(stage, body, count=1)


def test_a_defect_in_a_generators_opening_reaches_whoever_waits() -> None:
    def options(place: int, number: int) -> dict[str, Any]:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError, match="a defect"):
        play(Stage(options), lambda replicas: asyncio.sleep(0))


class Places:
    """Fake servers in processes of their own, one at a time in each place; `kill` is SIGKILL."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self.starts = 0

    def open(self, place: int) -> Callable[[], Any]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[ServerGenerator]:
            self.starts += 1
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rl.generators.fake_server", "0"), stdout=asyncio.subprocess.PIPE
            )
            self._processes[place] = process
            try:
                assert process.stdout is not None
                url = (await process.stdout.readline()).decode().strip()
                async with open_server(ServerSettings(url, self._model, max_context=4000)) as generator:
                    yield generator
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()

        return opened

    def kill(self, place: int) -> None:
        self._processes[place].kill()


def test_a_loop_whose_generators_are_killed_loses_no_episode_and_counts_none_twice(tmp_path: Path) -> None:
    save_file({"weights": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    places = Places(tmp_path)

    def before_step(batch: Batch) -> None:
        """Rollouts are under way while the trainer works."""
        if batch.step in (2, 4):
            places.kill(batch.step // 4)

    async def body() -> None:
        opens = [places.open(place) for place in range(2)]
        with open_segment_file(tmp_path) as segment:
            # What it waits for is the start of four interpreters, which takes what the machine has left.
            async with asyncio.timeout(100), open_replicas(opens, PATIENCE) as replicas:
                plan = Plan(steps=8, groups_per_batch=2, samples_per_group=4)
                rig = Rig(tmp_path, plan, before_step=before_step, served=replicas, segment=segment)
                await rig.loop.run()
                rig.ledger.check()
                assert (rig.loop.step, replicas.version) == (8, 8)
                # Both deaths are noticed by now, for each update asks all that are ready; a start may be due.
                while places.starts < 4:
                    await asyncio.sleep(0.01)
                assert set(rig.ledger.episodes.reasons) <= {"zero_advantage"}
                assert replicas.stats().finished >= rig.ledger.episodes.generated

    asyncio.run(body())
