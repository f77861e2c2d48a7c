"""A vLLM server as a generator, against a fake of its calls: their order, and faults at each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.errors import ConfigError
from rl.generator import ContextTooLong, GeneratorDead, GeneratorUnavailable, Sampling, UpdateFailed
from rl.generators.calls import ServerSettings
from rl.generators.fake import FAKE_LOGPROB, ByteTokenizer, FakeGenerator, sums_reply
from rl.generators.fake_server import DROP, ERROR, HANG, FakeServer, serving
from rl.generators.server import ServerGenerator, open_server, to_generation
from rl.segment import Segment, create_segment, places_of
from rl.types import VersionSpan
from rl.weights import open_segment_file

PLACES = places_of([("weights", "float32", (1,))])
PROMPT = np.array(ByteTokenizer().encode("What is 1 + 2?"), np.int32)
SAMPLING = Sampling(64)
UPDATE = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
HANG_SECONDS = 1.5
FIRST = ["init_weight_transfer_engine", *UPDATE]


def limits(fault: str) -> dict[str, float]:
    """Short only where a call hangs: elsewhere a slow machine must not pass for a hanging server."""
    return {"admin_seconds": HANG_SECONDS} if fault == HANG else {}


async def at_once(seconds: float) -> None:
    """Waits between attempts."""


@dataclass
class Bench:
    """A fake server, and what is needed to bring weights to it."""

    server: FakeServer
    url: str
    model: Path
    path: Path
    segment: Segment

    def write(self, version: int) -> Path:
        with self.segment.writing(version):
            pass
        return self.path

    @asynccontextmanager
    async def connected(self, **limits: float) -> AsyncIterator[ServerGenerator]:
        settings = ServerSettings(self.url, self.model, max_context=200, **limits)  # type: ignore[arg-type]
        async with open_server(settings, at_once) as generator:
            yield generator


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Runs a test's body with a bench of its own, within 20 s."""
    save_file({"weights": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")

    def run_body(body: Callable[[Bench], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def whole() -> None:
            fake = FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 1.0), **options)
            server = FakeServer(fake)
            async with asyncio.timeout(20), serving(server) as url:
                with open_segment_file(tmp_path) as path:
                    await body(Bench(server, url, tmp_path, path, create_segment(path, PLACES)))

        asyncio.run(whole())

    return run_body


def test_tokens_go_in_and_come_out(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            drawn = await generator.generate(PROMPT, SAMPLING)
            assert ByteTokenizer().decode(drawn.ids.tolist()).startswith("print(1 + 2)")
            assert drawn.logprobs.tolist() == [FAKE_LOGPROB] * len(drawn.ids)
            assert drawn.spans == (VersionSpan(0, 0, len(drawn.ids)),)
            assert drawn.finish_reason == "stop"
            cut = await generator.generate(PROMPT, Sampling(4))
            assert (len(cut.ids), cut.finish_reason) == (4, "length")
            stats = generator.stats()
            assert (stats.finished, stats.running) == (2, 0)
            assert stats.generated_tokens == len(drawn.ids) + 4
            assert stats.prompt_tokens == 2 * len(PROMPT)
            with pytest.raises(ContextTooLong, match="do not fit into 200"):
                await generator.generate(PROMPT, Sampling(199))
        assert bench.server.salts == ["v0", "v0"]

    run(body)


def test_an_update_makes_vllms_calls_in_their_order(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            await generator.update_weights(bench.write(1), 1)
            assert bench.server.calls == FIRST
            assert bench.server.bodies["init_weight_transfer_engine"] == {
                "init_info": {"path": str(bench.path)}
            }
            assert bench.server.bodies["pause"] == {"mode": "keep", "clear_cache": "false"}
            assert bench.server.bodies["update_weights"] == {"update_info": {"version": 1}}
            assert bench.server.bodies["finish_weight_update"] == {"weight_version": "1"}
            await generator.update_weights(bench.write(2), 2)
            assert bench.server.calls == [*FIRST, *UPDATE]
            assert (generator.version, bench.server.weight_version) == (2, "2")
            drawn = await generator.generate(PROMPT, SAMPLING)
            assert [span.version for span in drawn.spans] == [2]
        assert bench.server.salts == ["v2"]

    run(body)


def test_requests_go_on_through_an_update(run: Callable[..., None]) -> None:
    gate = asyncio.Event()

    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            drawing = asyncio.ensure_future(generator.generate(PROMPT, SAMPLING))
            while not bench.server.generator.stats().running:
                await generator.connect()  # a call and its answer: by then the request may have arrived
            await generator.update_weights(bench.write(1), 1)
            gate.set()
            assert [span.version for span in (await drawing).spans] == [0, 1]

    run(body, gate=lambda: gate)


@pytest.mark.parametrize(
    ("call", "fault"), [("init_weight_transfer_engine", ERROR), ("pause", ERROR), ("pause", HANG)]
)
def test_a_fault_before_the_weights_change_leaves_the_old_ones(
    run: Callable[..., None], call: str, fault: str
) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected(**limits(fault)) as generator:
            bench.server.faults[f"/{call}"].append(fault)
            with pytest.raises(UpdateFailed, match=f"/{call}"):
                await generator.update_weights(bench.write(1), 1)
            assert (generator.version, bench.server.weight_version) == (0, "default")
            assert not bench.server.paused
            drawn = await generator.generate(PROMPT, SAMPLING)
            assert [span.version for span in drawn.spans] == [0]
            await generator.update_weights(bench.path, 1)
            assert generator.version == 1

    run(body)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        *((call, fault) for call in UPDATE[1:-1] for fault in (ERROR, DROP)),
        ("update_weights", HANG),
    ],
)
def test_after_a_fault_in_the_middle_the_server_serves_nothing_until_it_has_whole_weights(
    run: Callable[..., None], call: str, fault: str
) -> None:
    """Nothing that was drawn meanwhile is handed out, and the server is not left paused."""
    gate = asyncio.Event()

    async def body(bench: Bench) -> None:
        async with bench.connected(**limits(fault)) as generator:
            drawing = asyncio.ensure_future(generator.generate(PROMPT, SAMPLING))
            while not bench.server.generator.stats().running:
                await generator.connect()
            # Of a start, the second one too: the first is taken for the end of an update that broke off.
            bench.server.faults[f"/{call}"] += [fault] * (2 if call.startswith("start") else 1)
            with pytest.raises(GeneratorDead, match="failed at weights 1"):
                await generator.update_weights(bench.write(1), 1)
            assert generator.version == 0
            assert not bench.server.paused
            assert "abort_requests" in bench.server.calls
            assert bench.server.calls[-2:] == ["update_weight_version", "resume"]
            assert bench.server.weight_version == "unknown"
            for call_again in (drawing, generator.generate(PROMPT, SAMPLING)):
                with pytest.raises(GeneratorDead):
                    await call_again
            with pytest.raises(GeneratorDead):
                await generator.update_weights(bench.path, 1)
        bench.server.faults.clear()
        gate.set()
        async with bench.connected() as generator:
            await generator.update_weights(bench.write(2), 2)
            assert [span.version for span in (await generator.generate(PROMPT, SAMPLING)).spans] == [2]

    run(body, gate=lambda: gate)


def test_a_server_that_stays_paused_is_given_up(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            bench.server.faults["/resume"].append(ERROR)
            with pytest.raises(GeneratorDead, match="stays paused"):
                await generator.update_weights(bench.write(1), 1)
            with pytest.raises(GeneratorDead):
                await generator.generate(PROMPT, SAMPLING)

    run(body)


def test_an_update_that_is_cancelled_resumes_the_server(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            bench.server.faults["/update_weights"].append(HANG)
            update = asyncio.ensure_future(generator.update_weights(bench.write(1), 1))
            while "update_weights" not in bench.server.calls:
                await generator.connect()
            assert bench.server.paused
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert not bench.server.paused

    run(body)


def test_whoever_gives_an_update_up_while_the_server_is_resumed_has_updated_it(
    run: Callable[..., None],
) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected(**limits(HANG)) as generator:
            bench.server.faults["/resume"].append(HANG)
            update = asyncio.ensure_future(generator.update_weights(bench.write(1), 1))
            while "resume" not in bench.server.calls:
                await asyncio.sleep(0)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert (generator.version, bench.server.weight_version) == (1, "1")

    run(body)


def test_a_server_is_resumed_before_its_connections_are_closed(run: Callable[..., None]) -> None:
    """Whoever gives an update up may go without waiting for what that leaves to be done."""

    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            bench.server.faults["/update_weights"].append(HANG)
            update = asyncio.ensure_future(generator.update_weights(bench.write(1), 1))
            for reached in ("update_weights", "abort_requests"):
                while reached not in bench.server.calls:
                    await asyncio.sleep(0)
                update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert bench.server.paused
        assert not bench.server.paused

    run(body)


def test_a_cut_connection_is_tried_again_and_a_slow_draw_costs_one_request(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator, bench.connected(draw_seconds=HANG_SECONDS) as hasty:
            faults = bench.server.faults["/inference/v1/generate"]
            faults.append(DROP)
            await generator.generate(PROMPT, SAMPLING)
            faults.append(ERROR)
            with pytest.raises(GeneratorUnavailable, match="answered 500"):
                await generator.generate(PROMPT, SAMPLING)
            faults.append(HANG)
            with pytest.raises(GeneratorUnavailable, match=r"took longer than 1\.5 s"):
                await hasty.generate(PROMPT, SAMPLING)
            await generator.generate(PROMPT, SAMPLING)
            faults.append(ERROR)
            bench.server.faults["/health"].append(ERROR)
            with pytest.raises(GeneratorDead, match="is gone"):
                await generator.generate(PROMPT, SAMPLING)

    run(body)


def test_a_server_that_lost_its_weights_is_found_out_by_its_first_answer(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            await generator.update_weights(bench.write(1), 1)
            # As if it had been started again behind the same address.
            bench.server.generator = FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 1.0))
            with pytest.raises(GeneratorDead, match="drew with weights 0 after it had 1: it was restarted"):
                await generator.generate(PROMPT, SAMPLING)
            assert generator.stats().finished == 0

    run(body)


def test_weights_of_an_earlier_run_are_not_taken_for_the_models(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            await generator.update_weights(bench.write(1), 1)
        async with bench.connected() as generator:
            assert generator.version == -1

    run(body)


def test_a_server_that_is_not_there_or_has_no_calls_for_weights(tmp_path: Path) -> None:
    async def body() -> None:
        settings = ServerSettings("http://127.0.0.1:9", tmp_path)
        with pytest.raises(GeneratorDead, match="is not there"):
            async with open_server(settings, at_once):
                pass
        server = FakeServer(FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 1.0)))
        async with serving(server) as url:
            with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
                async with open_server(ServerSettings(f"{url}/elsewhere", tmp_path), at_once):
                    pass
            server.draws = False
            with pytest.raises(ConfigError, match="--enable-scale-out"):
                async with open_server(ServerSettings(url, tmp_path), at_once):
                    pass

    asyncio.run(body())


def test_files_are_refused_and_a_missing_logprob_is_not_a_number(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        async with bench.connected() as generator:
            with pytest.raises(UpdateFailed, match="out of shared memory, not from"):
                await generator.update_weights(bench.model, 1)
            with pytest.raises(UpdateFailed, match="weights 7 did not load"):
                await generator.update_weights(bench.path, 7)
        assert bench.server.calls == []

    run(body)
    entries = [{"token_id": 5, "logprob": -1.0, "rank": 1}, {"token_id": 6, "logprob": -9999.0, "rank": None}]
    choice = {"token_ids": [5, 6], "logprobs": {"content": entries}, "finish_reason": "stop"}
    choice["weight_versions"] = [{"version": "default", "start": 0, "end": 2}]
    assert np.isnan(to_generation({"choices": [choice]}).logprobs).tolist() == [False, True]
