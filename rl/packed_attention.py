"""Attention over a packed tree of segments: each segment sees its ancestors and, causally, itself.

Registered with transformers under a name, so that any model written against its attention interface
computes packed groups unchanged. One attention call a segment costs the sum of what each branch needs;
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

ATTENTION_NAME = "packed_tree"


@dataclass(frozen=True, slots=True)
class Tree:
    """What attention needs of a pass: segment lengths, ancestors, and one additive mask a branch.

    A mask has shape (segment, ancestors + segment); None for a root, where plain causal order serves.
    """

    sizes: tuple[int, ...]
    ancestors: tuple[tuple[int, ...], ...]
    masks: tuple[Tensor | None, ...]


def tree_of(packed: PackedPass, device: torch.device, dtype: torch.dtype) -> Tree:
    sizes = tuple(segment.end - segment.start for segment in packed.segments)
    ancestors = tuple(segment.ancestors for segment in packed.segments)
    masks: list[Tensor | None] = []
    for size, above in zip(sizes, ancestors, strict=True):
        if not above:
            masks.append(None)
            continue
        seen = sum(sizes[i] for i in above)
        future = torch.full((size, size), float("-inf"), device=device, dtype=dtype).triu(1)
        masks.append(torch.cat([torch.zeros(size, seen, device=device, dtype=dtype), future], dim=1))
    return Tree(sizes, ancestors, tuple(masks))


def packed_tree_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """transformers' attention signature; query (1, heads, T, head width), result (1, T, heads, head width).

    `options` holds `tree` (from `tree_of`) and the model's `scaling`. The segments are split once, whose
    gradient is one concatenation; slicing each would zero-fill the whole sequence once a segment.
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
