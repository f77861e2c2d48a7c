"""How a run's generators are started, once and again: engines of its own, or servers that it is told of."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from rl.config import Config, endpoint_key
from rl.errors import ConfigError
from rl.generator import Generator
from rl.generators.broadcast import Broadcast, open_broadcast
from rl.generators.calls import ServerSettings
from rl.generators.server import ServerGenerator, open_server
from rl.generators.vllm import VllmSettings, open_vllm
from rl.precision import Precision
from rl.replica import Open
from rl.replicas import open_replicas
from rl.sender_process import open_sender


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


@asynccontextmanager
async def open_generator(
    config: Config, model_path: Path, logs: Path, precision: Precision
) -> AsyncIterator[Generator]:
    """All replicas as one, for the length of the block. Raises ConfigError, GeneratorDead."""
    kind = config.generator.weights
    if kind not in ("nccl", "gloo"):
        async with open_replicas(generator_opens(config, model_path, logs, precision)) as replicas:
            yield replicas
        return
    address = config.generator.address or await asyncio.to_thread(own_address, config.generator.servers)
    async with (
        open_sender(kind, logs / "sender.log") as sender,
        open_broadcast(sender, address) as broadcast,
    ):
        opens = [partial(_server, config, url, model_path, broadcast) for url in config.generator.servers]

        def announce(generators: Sequence[Generator], version: int) -> None:
            servers = [each for each in generators if isinstance(each, ServerGenerator)]
            broadcast.announce([server.calls for server in servers], version)

        async with open_replicas(opens, announce=announce) as replicas:
            yield replicas


def own_address(servers: Sequence[str]) -> str:
    """The address of this host towards the first server on another one, or else the loopback's. Nothing is
    sent. Raises ConfigError."""
    for url in servers:
        host = urlsplit(url).hostname or ""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, 9))
            except OSError as error:
                raise ConfigError(f"generator.servers: no way to {url!r}: {error.strerror}") from error
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    return "127.0.0.1"


def generator_opens(config: Config, model_path: Path, logs: Path, precision: Precision) -> list[Open]:
    """One for each replica. The first engine logs to `vllm.log` in the directory `logs`, further ones to
    `vllm-1.log` and so on; each has a seed of its own."""
    if config.generator.servers:
        return [partial(_server, config, url, model_path, None) for url in config.generator.servers]
    first = engine_settings(config, model_path, logs / "vllm.log", precision)
    further = [
        replace(first, seed=config.seed + number, log_path=logs / f"vllm-{number}.log")
        for number in range(1, config.generator.replicas)
    ]
    lock = asyncio.Lock()
    return [partial(_engine, settings, lock) for settings in (first, *further)]


def _server(
    config: Config, url: str, model_path: Path, channel: Broadcast | None
) -> AbstractAsyncContextManager[Generator]:
    return open_server(
        ServerSettings(
            url=url,
            model=model_path.resolve(),
            max_context=config.episode.context_tokens,
            key=endpoint_key(),
            draw_seconds=config.episode.turn_seconds,
        ),
        channel=channel,
    )


@asynccontextmanager
async def _engine(settings: VllmSettings, lock: asyncio.Lock) -> AsyncIterator[Generator]:
    """Engines start one after the other: a start sets variables and the output of this whole process."""
    async with AsyncExitStack() as stack:
        async with lock:
            generator = await stack.enter_async_context(open_vllm(settings))
        yield generator
