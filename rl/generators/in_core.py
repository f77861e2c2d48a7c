"""vLLM's executor for a worker in the engine's own process, which may take a call's time in other threads."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InCoreExecutor(UniProcExecutor):  # type: ignore[misc]
    """A worker's method that returns a Future is answered when that is done; until then the engine goes on.
    Its core does so with any call that gives it a Future, but does not look into the list of results.
    """

    def collective_rpc(self, *arguments: Any, **keywords: Any) -> Any:
        results = super().collective_rpc(*arguments, **keywords)
        if isinstance(results, list) and isinstance(results[0], Future):
            return results[0]
        return results
