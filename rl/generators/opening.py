"""How a run's generators are started, once and again: engines of its own, or servers that it is told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rl.config import Config, endpoint_key
from rl.generator import Generator
from rl.generators.server import ServerSettings, open_server
from rl.generators.vllm import VllmSettings, open_vllm
from rl.precision import Precision
from rl.replicas import Open


def engine_settings(config: Config, model_path: Path, log: Path, precision: Precision) -> VllmSettings:
    """How an engine of the run is started."""
    return VllmSettings(
        model=model_path.resolve(),
        log_path=log,
        seed=config.seed,
        max_concurrent=config.concurrent_episodes,
        max_context=config.episode.context_tokens,
        kv_cache_bytes=config.generator.kv_cache_bytes,
        compiled=config.generator.compiled,
        precision=precision,
    )


def generator_opens(config: Config, model_path: Path, logs: Path, precision: Precision) -> list[Open]:
    """One for each replica. The first engine logs to `vllm.log` in the directory `logs`, further ones to
    `vllm-1.log` and so on; each has a seed of its own."""
    if config.generator.servers:
        return [partial(_server, config, url, model_path) for url in config.generator.servers]
    first = engine_settings(config, model_path, logs / "vllm.log", precision)
    further = [
        replace(first, seed=config.seed + number, log_path=logs / f"vllm-{number}.log")
        for number in range(1, config.generator.replicas)
    ]
    lock = asyncio.Lock()
    return [partial(_engine, settings, lock) for settings in (first, *further)]


def _server(config: Config, url: str, model_path: Path) -> AbstractAsyncContextManager[Generator]:
    return open_server(
        ServerSettings(
            url=url,
            model=model_path.resolve(),
            max_context=config.episode.context_tokens,
            key=endpoint_key(),
            draw_seconds=config.episode.turn_seconds,
        )
    )


@asynccontextmanager
async def _engine(settings: VllmSettings, lock: asyncio.Lock) -> AsyncIterator[Generator]:
    """Engines start one after the other: a start sets variables and the output of this whole process."""
    async with AsyncExitStack() as stack:
        async with lock:
            generator = await stack.enter_async_context(open_vllm(settings))
        yield generator
