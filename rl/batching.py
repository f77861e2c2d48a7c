"""Packs groups into sequences without padding, so that what several samples share is computed once.

A group is a tree: its prompt, then one branch a sample. Groups that are computed in the same pass
share a further trunk, the longest common beginning of their prompts (the instructions and examples
that every task has). Every token of the tree stands once in the packed sequence:

    trunk | rest of prompt A | sample A1 | sample A2 | … | rest of prompt B | sample B1 | …

A token attends to its own segment causally and to the whole of its segment's ancestors; its position
counts along its own branch. The result equals computing each sample behind its own full prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl.advantage import scored_advantages
from rl.types import Group, LogProbs, PackedGroup, Sample, TokenIds, Turn

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, end)` of the packed sequence; `ancestors` index the segments above it on its branch."""

    start: int
    end: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedPass:
    """One forward and backward pass.

    `ids` and `positions` have one entry a token of the packed sequence (T). The other arrays have one
    entry a loss token (L): the output at `sources` predicts `targets`, which the sampler drew with
    log-probability `logprobs`; `advantages` is that of the token's sample.
    """

    ids: TokenIds
    positions: Indices
    segments: tuple[Segment, ...]
    sources: Indices
    targets: Indices
    logprobs: LogProbs
    advantages: npt.NDArray[np.float32]


def pack_group(group: Group) -> PackedGroup | None:
    """The group as the trainer wants it; None when its rewards carry no signal."""
    members = scored_advantages(group)
    if members is None:
        return None
    samples = tuple(sample_from_turns(episode.turns, advantage) for episode, advantage in members)
    return PackedGroup(group.task.key, group.prompt_ids, samples)


def sample_from_turns(turns: Sequence[Turn], advantage: float) -> Sample:
    """Joins the turns as they stood in the context; observations carry no loss.

    What follows the last sampled token predicts nothing and is cut off.
    """
    ids: list[TokenIds] = []
    logprobs: list[LogProbs] = []
    for turn in turns:
        ids += [turn.sampled_ids, turn.observation_ids]
        logprobs += [turn.logprobs, np.full(len(turn.observation_ids), np.nan, np.float32)]
    mask = np.concatenate(
        [
            np.full(len(part), sampled)
            for turn in turns
            for part, sampled in ((turn.sampled_ids, True), (turn.observation_ids, False))
        ]
    )
    end = int(np.flatnonzero(mask)[-1]) + 1
    return Sample(
        ids=np.concatenate(ids).astype(np.int32)[:end],
        loss_mask=mask[:end],
        logprobs=np.concatenate(logprobs).astype(np.float32)[:end],
        advantage=advantage,
    )


def packed_tokens(groups: Sequence[PackedGroup]) -> int:
    """Tokens of one pass over these groups: the trunk once, then the rest of each prompt and every sample."""
    alone = sum(len(group.prompt_ids) + sum(len(sample.ids) for sample in group.samples) for group in groups)
    return alone - (len(groups) - 1) * shared_trunk(groups)


def plan_passes(groups: Sequence[PackedGroup], max_tokens: int) -> Iterator[PackedPass]:
    """Packs whole groups, in order, into passes of at most `max_tokens` tokens (one group may exceed it).

    Memory grows with the tokens of a pass, and what is saved by a shared trunk grows with its groups.
    """
    chosen: list[PackedGroup] = []
    for group in groups:
        if chosen and packed_tokens([*chosen, group]) > max_tokens:
            yield pack_pass(chosen)
            chosen = []
        chosen.append(group)
    if chosen:
        yield pack_pass(chosen)


def shared_trunk(groups: Sequence[PackedGroup]) -> int:
    """Length of the trunk of a pass over these groups; 0 for a single one, whose prompt is its own."""
    return common_prefix([group.prompt_ids for group in groups]) if len(groups) > 1 else 0


def common_prefix(prompts: Sequence[TokenIds]) -> int:
    """Length of the longest common beginning that leaves every prompt at least one token of its own."""
    limit = min(len(prompt) for prompt in prompts) - 1
    first = prompts[0][:limit]
    for prompt in prompts[1:]:
        differing = np.flatnonzero(first != prompt[: len(first)])
        first = first[: differing[0]] if len(differing) else first
    return len(first)


def pack_pass(groups: Sequence[PackedGroup]) -> PackedPass:
    """Lays out the groups as one tree. Raises ValueError on an empty prompt or sample."""
    packer = _Packer()
    trunk = shared_trunk(groups)
    root: tuple[int, ...] = ()
    if trunk > 0:
        root = (packer.add(groups[0].prompt_ids[:trunk], ()),)
    for group in groups:
        prompt = packer.add(group.prompt_ids[trunk:], root)
        for sample in group.samples:
            packer.add_sample(sample, (*root, prompt))
    return packer.result()


class _Packer:
    """Collects segments; `add` returns the index by which later segments name an ancestor."""

    def __init__(self) -> None:
        self._length = 0
        self._segments: list[Segment] = []
        self._ids: list[TokenIds] = []
        self._positions: list[Indices] = []
        self._losses: list[tuple[Indices, TokenIds, LogProbs, float]] = []

    def add(self, ids: TokenIds, ancestors: tuple[int, ...]) -> int:
        if len(ids) == 0:
            raise ValueError("a prompt or sample without a token cannot be packed")
        offset = sum(self._segments[i].end - self._segments[i].start for i in ancestors)
        self._segments.append(Segment(self._length, self._length + len(ids), ancestors))
        self._ids.append(ids)
        self._positions.append(np.arange(offset, offset + len(ids)))
        self._length += len(ids)
        return len(self._segments) - 1

    def add_sample(self, sample: Sample, ancestors: tuple[int, ...]) -> None:
        segment = self._segments[self.add(sample.ids, ancestors)]
        sources = np.arange(segment.start - 1, segment.end - 1)
        sources[0] = self._segments[ancestors[-1]].end - 1
        mask = sample.loss_mask
        self._losses.append((sources[mask], sample.ids[mask], sample.logprobs[mask], sample.advantage))

    def result(self) -> PackedPass:
        sources, targets, logprobs, advantages = zip(*self._losses, strict=True)
        counts = [len(part) for part in sources]
        return PackedPass(
            ids=np.concatenate(self._ids),
            positions=np.concatenate(self._positions),
            segments=tuple(self._segments),
            sources=np.concatenate(sources),
            targets=np.concatenate(targets).astype(np.int64),
            logprobs=np.concatenate(logprobs),
            advantages=np.repeat(np.asarray(advantages, np.float32), counts),
        )
