"""A run without a model: a generator that can only add, and a trainer that counts. For trying one's tasks,
sandboxes and settings, and how a run survives what kills it, in seconds and without an accelerator.

What is drawn depends on the seed, the dialogue and the weights' version alone, not on the order of requests:
two runs of a seed see the same episodes.
"""

from __future__ import annotations

from pathlib import Path

from rl.dialogue import Tokenizer
from rl.generators.fake import FakeGenerator, sums_reply

SKILL = 0.5
"""How often the generator adds well, so that groups carry a signal."""


def fake_generator(tokenizer: Tokenizer, seed: int) -> FakeGenerator:
    """Solves half of the sums it is asked, and nothing else."""
    return FakeGenerator(tokenizer, sums_reply(lambda _: SKILL), seed=seed)


def empty_model(directory: Path) -> Path:
    """A model directory that holds no model, where nothing reads one."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}\n")
    return directory
