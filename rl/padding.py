"""Computes a padded pass, which packing is measured against: the loss and gradient of the packed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rl.losses.recipes import Objective, Totals
from rl.losses.tokens import PassTokens, token_logprobs
from rl.losses.total import policy_loss
from rl.packed_attention import ATTENTION_NAME
from rl.precision import Precision
from rl.types import PackedGroup

PLAIN_ATTENTION = "sdpa"
"""transformers' own, which takes a mask of what is padding."""


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """The attention that padded passes need, for the length of the block."""
    model.set_attn_implementation(PLAIN_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


class Padded:
    """Computes padded passes with `model`; matrix products take factors in `precision`."""

    def __init__(self, model: PreTrainedModel, objective: Objective, precision: Precision) -> None:
        self._model = model
        self._objective = objective
        self._factors = torch.bfloat16 if precision == "bfloat16" else torch.float32

    def accumulate(self, chosen: Sequence[PackedGroup], totals: Totals) -> int:
        """Adds the gradient of one pass, a sample a group, within `plain_attention`; returns the tokens
        computed, padding included."""
        model, device = self._model, self._model.device
        rows = [np.concatenate([each.prompt_ids, each.samples[0].ids]) for each in chosen]
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True)
        real = torch.arange(ids.shape[1])[None] < lengths[:, None]
        targets = torch.from_numpy(
            np.concatenate(
                [
                    index * ids.shape[1] + len(each.prompt_ids) + np.flatnonzero(each.samples[0].loss_mask)
                    for index, each in enumerate(chosen)
                ]
            )
        )
        with torch.autocast(device.type, self._factors, enabled=self._factors != torch.float32):
            hidden = model.base_model(
                input_ids=ids.to(device), attention_mask=real.to(device), use_cache=False
            ).last_hidden_state
            logprobs = token_logprobs(
                hidden.flatten(0, 1)[(targets - 1).to(device)],
                model.get_output_embeddings().weight,
                ids.flatten()[targets].to(device),
            )
        sums = policy_loss(_inputs(chosen, logprobs), self._objective, totals)
        sums.loss.backward()
        return ids.numel()


def _inputs(chosen: Sequence[PackedGroup], logprobs: Tensor) -> PassTokens:
    samples = [each.samples[0] for each in chosen]
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    drawn = np.concatenate([sample.logprobs[sample.loss_mask] for sample in samples])
    advantages = np.array([sample.advantage for sample in samples], np.float32)
    return PassTokens(
        logprobs=logprobs,
        sampler_logprobs=torch.from_numpy(drawn).to(logprobs.device),
        advantages=torch.from_numpy(np.repeat(advantages, counts)).to(logprobs.device),
        samples=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)).to(logprobs.device),
        sample_count=len(samples),
        reference_logprobs=None,
    )
