"""Packs groups into sequences without padding, so that what several samples share is computed once.

A group is its prompt, then one branch a sample; samples that begin alike share that beginning too, and
groups of the same pass share the instructions and examples that every task has. The result equals
computing each sample behind its own full prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl.advantage import DEFAULT_RULE, AdvantageRule, scored_advantages
from rl.prefix_tree import Indices, PrefixTree, Segment, merge
from rl.types import Group, LogProbs, PackedGroup, Sample, TokenIds, Turn


@dataclass(frozen=True, slots=True)
class PackedPass:
    """One forward and backward pass.

    `ids` and `positions` have one entry a token of the packed sequence (T). The output at `sources`
    predicts `targets`, one entry a token that any sample drew (U). The other arrays have one entry a
    loss token of a sample (L): `rows` index U, the sampler drew it with log-probability `logprobs`,
    `advantages` is that of its sample, `samples` says which of `sample_count` samples it is.
    """

    ids: TokenIds
    positions: Indices
    segments: tuple[Segment, ...]
    sources: Indices
    targets: Indices
    rows: Indices
    logprobs: LogProbs
    advantages: npt.NDArray[np.float32]
    samples: Indices
    sample_count: int


def pack_group(group: Group, rule: AdvantageRule = DEFAULT_RULE) -> PackedGroup | None:
    """The group as the trainer wants it; None when its rewards carry no signal."""
    members = scored_advantages(group, rule)
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


def plan_passes(groups: Sequence[PackedGroup], max_tokens: int) -> Iterator[PackedPass]:
    """Packs whole groups, in order, into passes of at most `max_tokens` tokens (one group may exceed it).

    Memory grows with the tokens of a pass, and what is saved by a shared trunk grows with its groups.
    """
    chosen: list[PackedGroup] = []
    for group in groups:
        if chosen and len(tree_of_groups([*chosen, group]).ids) > max_tokens:
            yield pack_pass(chosen)
            chosen = []
        chosen.append(group)
    if chosen:
        yield pack_pass(chosen)


def tree_of_groups(groups: Sequence[PackedGroup]) -> PrefixTree:
    """Every sample behind its prompt, merged."""
    return merge(
        [np.concatenate([group.prompt_ids, sample.ids]) for group in groups for sample in group.samples]
    )


def pack_pass(groups: Sequence[PackedGroup]) -> PackedPass:
    """Lays out the groups as one tree. Raises ValueError on an empty prompt, which leaves a first token
    that nothing predicts."""
    tree = tree_of_groups(groups)
    paths = iter(tree.paths)
    places: list[Indices] = []
    logprobs: list[LogProbs] = []
    advantages: list[float] = []
    for group in groups:
        if len(group.prompt_ids) == 0:
            raise ValueError(f"the prompt of {group.task_key!r} has no token")
        for sample in group.samples:
            drawn = np.flatnonzero(sample.loss_mask)
            places.append(next(paths)[len(group.prompt_ids) + drawn])
            logprobs.append(sample.logprobs[drawn])
            advantages.append(sample.advantage)
    lengths = [len(part) for part in places]
    unique, rows = np.unique(np.concatenate(places), return_inverse=True)
    return PackedPass(
        ids=tree.ids,
        positions=tree.positions,
        segments=tree.segments,
        sources=tree.parents[unique],
        targets=tree.ids[unique].astype(np.int64),
        rows=rows,
        logprobs=np.concatenate(logprobs),
        advantages=np.repeat(np.asarray(advantages, np.float32), lengths),
        samples=np.repeat(np.arange(len(places)), lengths),
        sample_count=len(places),
    )
