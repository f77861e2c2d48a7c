"""What tests of engines share: a tokenizer, scaled weights and their ways to an engine, exact references."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from rl.generator import Generation
from rl.shared_weights import SharedWeights
from rl.types import TokenIds

PROMPT = np.arange(5, 75, dtype=np.int32)


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer of one token a byte and the two ChatML marks."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    (directory / "tokenizer_config.json").write_text(settings)
    return directory


def weights(model: Path, directory: Path, scale: float) -> Path:
    """A directory with the model's weights, every matrix times `scale`."""
    directory.mkdir()
    scaled = {name: value * scale for name, value in load_file(model / "model.safetensors").items()}
    save_file(scaled, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text((model / "config.json").read_text())
    return directory


@dataclass
class Carried:
    """What brings scaled weights to an engine as a version: a directory, or the one segment."""

    model: Path
    segment: Path | None
    directory: Path

    def path(self, scale: float, version: int, dtype: torch.dtype = torch.float32) -> Path:
        """Where an engine finds them."""
        written = weights(self.model, self.directory / f"times-{scale:g}", scale)
        if self.segment is None:
            return written
        tensors = load_file(written / "model.safetensors")
        SharedWeights(self.segment, tensors, dtype).write(version, tensors)
        return self.segment


def reference(directory: Path, context: TokenIds, sampled: TokenIds) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probabilities of `sampled` after `context`, computed by transformers."""
    net = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    row = torch.from_numpy(np.concatenate([context, sampled])).long()
    with torch.no_grad():
        logits = net(input_ids=row[None]).logits[0, len(context) - 1 : -1]
    chosen = torch.log_softmax(logits, -1).gather(1, row[len(context) :, None])[:, 0]
    return np.asarray(chosen.numpy(), np.float32)


def check_cover(generation: Generation) -> None:
    """The spans cover all tokens in order, and every token has a log-probability."""
    assert [span.start for span in generation.spans] == [0, *(span.end for span in generation.spans[:-1])]
    assert generation.spans[-1].end == len(generation.ids) == len(generation.logprobs)
    assert np.isfinite(generation.logprobs).all()
    assert (generation.logprobs <= 0).all()
