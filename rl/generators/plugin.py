"""vLLM's plug-in: makes the weight-transfer backends `shared_memory` and `gloo` known to its processes.

    vllm serve MODEL --weight-transfer-config '{"backend": "shared_memory"}'

vLLM calls `register` in each of its processes, by the entry point in pyproject.toml.
"""

from __future__ import annotations

from contextlib import suppress

BACKEND = "shared_memory"


def register() -> None:
    """Adds the backends to vLLM's list; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, module, engine in (
        (BACKEND, "rl.generators.shared_memory", "SharedMemoryEngine"),
        ("gloo", "rl.generators.gloo", "GlooEngine"),
    ):
        with suppress(ValueError):  # registered already
            WeightTransferEngineFactory.register_engine(backend, module, engine)
