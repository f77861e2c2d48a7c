"""Runs inside vLLM's worker: makes new weights live in every form that the worker keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Reload:
    """vLLM mixes it into its worker (`worker_extension_cls`); called by its name through `collective_rpc`.

    The annotations name what the worker brings along.
    """

    reload_weights: Callable[..., None]
    model_runner: Any

    def reload_all_weights(self, weights_path: str) -> None:
        """vLLM's own reload, and then the output layer where it shares the embedding's weights.

        A model with tied weights has no output weights on disk, so vLLM's reload passes that layer over.
        Its parameter shares the embedding's memory and follows; but on a CPU the layer computes with a
        packed copy made at the start, and would go on to do so: every sampled token would come from the
        new hidden states through the old output weights. Processing the layer again packs it anew.
        """
        self.reload_weights(weights_path=weights_path)
        model: Any = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        if head is not None and getattr(model.config, "tie_word_embeddings", False):
            head.quant_method.process_weights_after_loading(head)
