"""vLLM's plug-in: makes the weight-transfer backend `shared_memory` known to a server's processes.

    vllm serve MODEL --weight-transfer-config '{"backend": "shared_memory"}'

vLLM calls `register` in each of its processes, by the entry point in pyproject.toml.
"""

from __future__ import annotations

from contextlib import suppress

BACKEND = "shared_memory"


def register() -> None:
    """Adds the backend to vLLM's list; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rl.generators.shared_memory", "SharedMemoryEngine"
        )
