"""What surrounds an engine while it starts: its variables, where it logs, and where it prints."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rl.processes import THREADS


def engine_environment(log_config: Path, scratch: Path, *, compiled: bool) -> dict[str, str]:
    """The variables under which the engine's processes must start.

    Threads bound to cores could not move away from the trainer's. Sockets and other files that vLLM
    leaves behind go to `scratch`; torch's cache of compiled code does not, for the next run wants it.
    An engine that is not `compiled` would still compile one function of the sampler, within the first
    request: 6 to 9 s for nothing that shows later.
    """
    torch_cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    return {
        **THREADS,
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "TORCHDYNAMO_DISABLE": "0" if compiled else "1",
        "TMPDIR": str(scratch),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(torch_cache)),
        "VLLM_RPC_BASE_PATH": str(scratch),
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
