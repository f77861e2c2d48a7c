"""The real generator: vLLM's AsyncLLM in its own process, fed token ids, updated in flight."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl.generator import Generation, GeneratorDead, GeneratorStats, Sampling, UpdateFailed
from rl.types import TokenIds, VersionSpan

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How to start the engine.

    `max_context` is in tokens, prompt and continuation together; `kv_cache_bytes` the memory for
    keys and values; `start_seconds` and `update_seconds` bound the start and one weight update.
    vLLM's own log goes to `log_path`.
    """

    model: Path
    log_path: Path
    seed: int = 0
    max_concurrent: int = 64
    max_context: int = 1024
    kv_cache_bytes: int = GIB
    compiled: bool = False
    start_seconds: float = 180.0
    update_seconds: float = 60.0


def engine_environment(log_config: Path) -> dict[str, str]:
    """The variables under which the engine's processes must start.

    OpenMP threads that spin while they wait take the cores from the trainer beside them; binding
    them to cores would keep the kernel from moving them away from it.
    """
    return {
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_CONFIG_PATH": str(log_config),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }


def write_log_config(log_path: Path) -> Path:
    """Write the logging configuration that sends vLLM's log to `log_path`; return where it lies."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "formatter": "plain", "filename": str(log_path)},
        },
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
        "root": {"handlers": ["file"], "level": "WARNING"},
    }
    path = log_path.with_suffix(".logging.json")
    path.write_text(json.dumps(config))
    return path


@contextmanager
def applied_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for the processes started inside the block, then put the old values back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send file descriptors 1 and 2 to `path`: what the engine's processes print, they print there.

    Child processes inherit the descriptors, so the block need only last until they have started.
    """
    saved = os.dup(1), os.dup(2)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, target):
            os.close(descriptor)


def start_engine(settings: VllmSettings) -> AsyncLLM:
    """Start the engine's processes and load the model; takes 15 to 40 s on two cores."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(settings.model),
        dtype="float32",
        seed=settings.seed,
        enforce_eager=not settings.compiled,
        max_model_len=settings.max_context,
        max_num_seqs=settings.max_concurrent,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        # Smaller blocks share more: with the CPU default of 128, the tail of a prompt that fills no
        # whole block is computed again for every sample and every turn. 32 is the kernel's smallest.
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(arguments)
