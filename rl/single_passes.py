"""The passes that packing is measured against: one sample at a time, and samples padded to the longest.

Every sample stands behind its own whole prompt; a packed pass has the same loss and the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rl.batching import PackedPass, pack_pass
from rl.types import PackedGroup


def one_by_one(groups: Sequence[PackedGroup]) -> Iterator[PackedPass]:
    """A pass for every sample."""
    for group in groups:
        for sample in group.samples:
            yield pack_pass([replace(group, samples=(sample,))])


def padded_passes(groups: Sequence[PackedGroup], max_tokens: int) -> Iterator[list[PackedGroup]]:
    """Samples, each as a group of its own, in order: as many as fit `max_tokens` once padded to the longest
    of their pass. A sample that is longer has a pass to itself."""
    chosen: list[PackedGroup] = []
    longest = 0
    for group in groups:
        for sample in group.samples:
            length = len(group.prompt_ids) + len(sample.ids)
            if chosen and max(longest, length) * (len(chosen) + 1) > max_tokens:
                yield chosen
                chosen, longest = [], 0
            chosen.append(replace(group, samples=(sample,)))
            longest = max(longest, length)
    if chosen:
        yield chosen
