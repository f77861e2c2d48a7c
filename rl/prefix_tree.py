"""Merges sequences into a tree, so that what several of them begin with is computed once.

Every token of the tree stands once in the packed sequence, each segment before those that branch off it:

    trunk | rest of prompt A | beginning of samples A1, A2 | rest of A1 | rest of A2 | rest of prompt B | …

A token attends to its own segment causally and to the whole of its segment's ancestors; its position
counts along its own branch. So each sequence is computed as if it stood alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl.types import TokenIds

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, end)` of the packed sequence; `ancestors` index the segments above it on its branch."""

    start: int
    end: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """`ids`, `positions` and `parents` have one entry a token (T).

    `parents` is the packed index of the token before on the branch, -1 at a root. `paths` has one array
    a sequence: the packed index of each of its tokens.
    """

    ids: TokenIds
    positions: Indices
    parents: Indices
    segments: tuple[Segment, ...]
    paths: tuple[Indices, ...]


def merge(sequences: Sequence[TokenIds]) -> PrefixTree:
    """The tree of all sequences, branches in the order in which they first appear."""
    segments: list[Segment] = []
    positions: list[Indices] = []
    parents: list[Indices] = []
    paths: list[list[Indices]] = [[] for _ in sequences]
    tokens: list[TokenIds] = []
    length = 0
    open_branches: list[tuple[list[int], int, tuple[int, ...]]] = [(list(range(len(sequences))), 0, ())]
    while open_branches:
        members, depth, above = open_branches.pop()
        shared = common_prefix([sequences[member] for member in members])
        if shared > depth:
            end = length + shared - depth
            places = np.arange(length, end)
            before = places - 1
            before[0] = segments[above[-1]].end - 1 if above else -1
            tokens.append(sequences[members[0]][depth:shared])
            positions.append(np.arange(depth, shared))
            parents.append(before)
            for member in members:
                paths[member].append(places)
            segments.append(Segment(length, end, above))
            above = (*above, len(segments) - 1)
            length = end
        branches: dict[int, list[int]] = {}
        for member in members:
            if len(sequences[member]) > shared:
                branches.setdefault(int(sequences[member][shared]), []).append(member)
        open_branches += [(branch, shared, above) for branch in reversed(branches.values())]
    return PrefixTree(
        np.concatenate(tokens),
        np.concatenate(positions),
        np.concatenate(parents),
        tuple(segments),
        tuple(np.concatenate(path) for path in paths),
    )


def common_prefix(sequences: Sequence[TokenIds]) -> int:
    """Length of the longest common beginning."""
    first = sequences[0][: min(len(sequence) for sequence in sequences)]
    for sequence in sequences[1:]:
        differing = np.flatnonzero(first != sequence[: len(first)])
        first = first[: differing[0]] if len(differing) else first
    return len(first)
