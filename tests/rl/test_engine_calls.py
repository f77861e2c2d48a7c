"""The generator over an engine that stands still at one of its calls: what a cancellation leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.generator import GeneratorDead, Sampling
from rl.generators.engine_stats import EngineStats
from rl.generators.vllm import VllmGenerator, VllmSettings

# Importing vLLM warns of what it uses itself.
pytestmark = pytest.mark.filterwarnings("default")

PROMPT = np.arange(5, dtype=np.int32)


class StandingEngine:
    """Has vLLM's calls, and notes them. The one that is named `stands` begins and never returns."""

    def __init__(self, stands: str) -> None:
        self.calls: list[str] = []
        self.reached = asyncio.Event()
        self._stands = stands

    async def pause_generation(self, **_: object) -> None:
        await self._call("pause")

    async def collective_rpc(self, name: str, **_: object) -> None:
        await self._call(name)

    async def update_weight_version(self, version: str) -> None:
        await self._call(f"version {version}")

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def generate(self, *_: object) -> AsyncIterator[None]:
        await self._call("generate")
        yield None

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._stands:
            self.reached.set()
            await asyncio.Event().wait()


Body = Callable[[StandingEngine, VllmGenerator, EngineStats], Coroutine[Any, Any, None]]


def play(model: Path, stands: str, body: Body) -> None:
    """Runs a test's body over an engine that stands still there."""
    save_file({"weights": np.zeros(1, np.float32)}, model / "model.safetensors")

    async def whole() -> None:
        engine, stats = StandingEngine(stands), EngineStats()
        settings = VllmSettings(model, model / "vllm.log")
        engine_for_vllm: Any = engine
        async with asyncio.timeout(100):  # the import of vLLM counts
            await body(engine, VllmGenerator(engine_for_vllm, settings, stats), stats)

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("stands", "version", "broken"),
    [("pause", 0, False), ("reload_all_weights", 0, True), ("version 1", 0, True), ("resume", 1, False)],
)
def test_an_update_that_is_cancelled_breaks_the_engine_only_while_its_weights_are_unknown(
    tmp_path: Path, stands: str, version: int, broken: bool
) -> None:
    async def body(engine: StandingEngine, generator: VllmGenerator, stats: EngineStats) -> None:
        update = asyncio.ensure_future(generator.update_weights(tmp_path, 1))
        await engine.reached.wait()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert engine.calls[-1] == "resume"
        assert generator.version == version
        # This engine ends every request without a token; one that is broken is not even asked.
        with pytest.raises(GeneratorDead, match="weight update broke it" if broken else "without any output"):
            await generator.generate(PROMPT, Sampling(1))
        assert ("generate" in engine.calls) is not broken

    play(tmp_path, stands, body)


def test_an_engine_at_rest_holds_nothing_and_has_no_queue(tmp_path: Path) -> None:
    """It tells of both with a pass alone, and makes none when the last requests are cancelled."""

    async def body(engine: StandingEngine, generator: VllmGenerator, stats: EngineStats) -> None:
        for _ in range(2):
            engine.reached.clear()
            drawing = asyncio.ensure_future(generator.generate(PROMPT, Sampling(1)))
            await engine.reached.wait()
            assert told(generator) == (1, 0.0, 0), "no pass has been made with it"
            stats.kv_cache_usage, stats.queued = 0.75, 3
            assert told(generator) == (1, 0.75, 3)
            drawing.cancel()
            await asyncio.wait((drawing,))
            assert told(generator) == (0, 0.0, 0)

    play(tmp_path, "generate", body)


def told(generator: VllmGenerator) -> tuple[int, float, int]:
    """Requests that run, the share of the cache that is held, requests that wait."""
    stats = generator.stats()
    return stats.running, stats.kv_cache_usage, stats.queued
