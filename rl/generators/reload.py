"""Runs inside vLLM's worker: makes new weights live in every form that the worker keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rl.adapter_files import is_adapter
from rl.generators.plugin import BACKEND, register


class Reload:
    """vLLM mixes it into its worker (`worker_extension_cls`); called by its name through `collective_rpc`.

    The annotations name what the worker brings along.
    """

    reload_weights: Callable[..., None]
    model_runner: Any
    vllm_config: Any
    device: Any
    weight_transfer_engine: Any

    def reload_all_weights(self, weights_path: str, base_path: str) -> None:
        """vLLM's own reload from a directory, and then the output layer. An adapter is added to the weights
        in `base_path`: vLLM forgets which model it was started with."""
        from rl import lora

        directory = Path(weights_path)
        if is_adapter(directory):
            self.reload_weights(weights_iterator=lora.merged(Path(base_path), directory))
        else:
            self.reload_weights(weights_path=weights_path)
        pack_tied_head(self.model_runner.get_model())

    def take_from(self, segment_path: str) -> None:
        """Has vLLM's calls for weight updates take them from a segment. An engine of our own is given its
        backend here, so that it needs no installed entry point as a server does."""
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        register()
        engine: Any = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=BACKEND),
            self.vllm_config,
            self.device,
            self.model_runner.get_model(),
        )
        engine.init_transfer_engine(engine.parse_init_info({"path": segment_path}))
        self.weight_transfer_engine = engine

    def prepare(self, version: int) -> Future[None]:
        """Begins what can be done of an update from the segment while the engine draws. Waited for by whoever
        calls it through `rl.generators.in_core` alone."""
        done: Future[None] = self.weight_transfer_engine.prepare(version)
        return done


def pack_tied_head(model: Any) -> None:
    """Packs the output layer anew where it shares the embedding's weights.

    A model with tied weights has no output weights on disk, so vLLM's reload passes that layer over. Its
    parameter shares the embedding's memory and follows; but on a CPU the layer computes with a packed copy
    made at the start, and would go on to do so: every sampled token would come from the new hidden states
    through the old output weights.
    """
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
