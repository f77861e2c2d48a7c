"""Attention over a packed tree of segments: each segment sees its ancestors and, causally, itself.

Registered with transformers under a name, so that any model written against its attention interface
computes packed groups unchanged. One attention call a branch costs the sum of what each branch needs;
one call with a block mask over the whole sequence would cost its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from rl.batching import PackedPass
from rl.prefix_tree import Segment

ATTENTION_NAME = "packed_tree"


CLUSTER_TOKENS = 512
"""A subtree of at most so many tokens is one attention call under a mask. Calls cost more than the masked
part of a small square; of a large one it is the other way round."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What attention needs of a pass: the length of each call's part, the parts above it, and its mask.

    A part is one segment, or a whole subtree. A mask is additive, of shape (part, parts above + part);
    None for a root segment, where plain causal order serves.
    """

    sizes: tuple[int, ...]
    ancestors: tuple[tuple[int, ...], ...]
    masks: tuple[Tensor | None, ...]


def tree_of(packed: PackedPass, device: torch.device, dtype: torch.dtype) -> Tree:
    segments = packed.segments
    parts = _parts(segments)
    part_of = {first: index for index, (first, _) in enumerate(parts)}
    ancestors = tuple(tuple(part_of[above] for above in segments[first].ancestors) for first, _ in parts)
    sizes = tuple(segments[last - 1].end - segments[first].start for first, last in parts)
    masks = tuple(_mask(segments, first, last, device, dtype) for first, last in parts)
    return Tree(sizes, ancestors, masks)


def _parts(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Ranges of segments: each the largest subtree that fits a cluster, else its first segment alone."""
    ends = [index + 1 for index in range(len(segments))]
    for index in reversed(range(len(segments))):
        for above in segments[index].ancestors:
            ends[above] = max(ends[above], ends[index])
    parts: list[tuple[int, int]] = []
    index = 0
    while index < len(segments):
        tokens = segments[ends[index] - 1].end - segments[index].start
        last = ends[index] if tokens <= CLUSTER_TOKENS else index + 1
        parts.append((index, last))
        index = last
    return parts


def _mask(
    segments: Sequence[Segment], first: int, last: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    if last == first + 1 and not segments[first].ancestors:
        return None
    base = segments[first].start
    seen = sum(segments[above].end - segments[above].start for above in segments[first].ancestors)
    size = segments[last - 1].end - base
    mask = torch.full((size, seen + size), float("-inf"), device=device, dtype=dtype)
    mask[:, :seen] = 0.0
    for segment in segments[first:last]:
        rows = mask[segment.start - base : segment.end - base, seen:]
        for above in segment.ancestors:
            if above >= first:
                rows[:, segments[above].start - base : segments[above].end - base] = 0.0
        own = rows[:, segment.start - base : segment.end - base]
        own.zero_().masked_fill_(torch.ones_like(own, dtype=torch.bool).triu(1), float("-inf"))
    return mask


def packed_tree_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """transformers' attention signature; query (1, heads, T, head width), result (1, T, heads, head width).

    `options` holds `tree` (from `tree_of`) and the model's `scaling`. The parts are split once, whose
    gradient is one concatenation; slicing each would zero-fill the whole sequence once a part.
    """
    tree, scale = options["tree"], options["scaling"]
    assert isinstance(tree, Tree)
    assert isinstance(scale, float)
    queries, keys, values = (torch.split(part, list(tree.sizes), dim=2) for part in (query, key, value))
    outputs = [
        functional.scaled_dot_product_attention(
            queries[index],
            _branch(keys, above, index),
            _branch(values, above, index),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        for index, (above, mask) in enumerate(zip(tree.ancestors, tree.masks, strict=True))
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _branch(parts: Sequence[Tensor], above: tuple[int, ...], index: int) -> Tensor:
    return torch.cat([parts[i] for i in (*above, index)], dim=2) if above else parts[index]


def register() -> None:
    """Makes the name known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, packed_tree_attention)
